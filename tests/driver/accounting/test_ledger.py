import json

import pytest

from driver.accounting.jsonl import read_lines
from driver.accounting.leases import LeaseTable, LedgerError, TrajectoryState
from driver.accounting.ledger import StepLedger
from services.process.phases import PHASES
from services.trajectories.data_order import DataOrder

TRAINED = TrajectoryState.TRAINED


def open_ledger(folder, warnings=None, fraction=0.05):
    warn = pytest.fail if warnings is None else warnings.append
    return StepLedger(folder, unexplained_fraction=fraction, warn=warn)


def table_of(count=10, seed=0):
    return LeaseTable(DataOrder.of_one(seed, count))


def through_json(state):
    return json.loads(json.dumps(state))


def train(table, leases):
    for lease in leases:
        assert table.end_group(lease.group_id, TRAINED) is TRAINED


def test_phases_of_every_process_add_up_to_the_step(tmp_path):
    ledger = open_ledger(tmp_path)
    table = table_of()
    leases = table.grant_leases(2)
    train(table, leases)
    record = ledger.close_step(
        4,
        {
            "learner": {"forward_backward": 6.0, "idle": 3.75, "unexplained": 0.2},
            "rollout-0": {"decode": 3.5, "idle": 6.5},
        },
        wall_s=10.0,
        leases=table,
    )
    for row in record.processes.values():
        assert set(row) == set(PHASES)
        assert sum(row.values()) == pytest.approx(10.0, abs=1e-12)
    assert record.processes["learner"]["unexplained"] == 0.25
    assert record.warnings == () and record.overlap_s == {}
    assert record.groups == {"trained": ["g00000000", "g00000001"]}
    (line,) = read_lines(tmp_path / "ledger.jsonl")
    assert line["step"] == 4 and line["groups"]["trained"] == ["g00000000", "g00000001"]
    assert sum(line["processes"]["rollout-0"].values()) == pytest.approx(10.0)


def test_seconds_without_a_phase_warn_above_the_threshold(tmp_path):
    warnings = []
    ledger = open_ledger(tmp_path, warnings)
    ledger.close_step(1, {"learner": {"idle": 9.5}}, wall_s=10.0, leases=table_of())
    assert warnings == []
    record = ledger.close_step(2, {"learner": {"idle": 9.4}}, wall_s=10.0, leases=table_of())
    assert warnings == [
        "step 2: 0.60 of 10.00 s of learner belong to no phase; log.unexplained_fraction=0.05 "
        "allows 0.50 s"
    ]
    assert record.warnings == tuple(warnings)


def test_seconds_counted_twice_warn_and_are_kept(tmp_path):
    warnings = []
    ledger = open_ledger(tmp_path, warnings)
    record = ledger.close_step(
        1, {"rollout-1": {"decode": 8.0, "wire": 3.0}}, wall_s=10.0, leases=table_of()
    )
    assert record.overlap_s == {"rollout-1": 1.0}
    row = record.processes["rollout-1"]
    assert row["unexplained"] == 0 and sum(row.values()) == 11.0
    assert "add up to 11.00 s of a step that took 10.00 s" in warnings[0]


def test_a_process_that_was_not_there_has_no_phase_for_that_and_no_warning(tmp_path):
    """Neither idle nor unexplained: it started in that step, and reported what it did since."""
    ledger = open_ledger(tmp_path)
    record = ledger.close_step(
        1,
        {
            "learner": {"idle": 10.0},
            "rollout-0": {},
            "rollout-1": {"decode": 3.0, "unexplained": 0.25},
            "rollout-2": {"decode": 10.0},
        },
        wall_s=10.0,
        leases=table_of(),
        gaps={"rollout-0", "rollout-1", "rollout-2", "rollout-7"},
    )
    assert record.absent_s == {"rollout-0": 10.0, "rollout-1": 6.75}
    assert sum(record.processes["rollout-0"].values()) == 0.0
    spent = {name: s for name, s in record.processes["rollout-1"].items() if s}
    assert spent == {"decode": 3.0, "unexplained": 0.25}
    (line,) = read_lines(tmp_path / "ledger.jsonl")
    for process, row in line["processes"].items():
        assert sum(row.values()) + line["absent_s"].get(process, 0.0) == 10.0


@pytest.mark.parametrize(
    "phase_s, wall_s, message",
    [
        ({"decoding": 1.0}, 10.0, "learner reports unknown phase 'decoding'"),
        ({"decode": -1.0}, 10.0, "learner reports decode=-1.0 s"),
        ({"decode": float("nan")}, 10.0, "learner reports decode=nan s"),
        ({}, 0.0, "wall_s=0.0 is no duration"),
    ],
)
def test_impossible_seconds_are_refused(tmp_path, phase_s, wall_s, message):
    ledger = open_ledger(tmp_path)
    with pytest.raises(LedgerError, match=message):
        ledger.close_step(3, {"learner": phase_s}, wall_s=wall_s, leases=table_of())
    assert read_lines(tmp_path / "ledger.jsonl") == []


def test_totals_of_a_checkpoint_that_is_older_than_a_phase_go_on(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.restore({"totals": {"rollout-0": {"decode": 2.0, "unexplained": 0.0}}}, step=0)
    seconds = {"decode": 1.0, "environment": 3.0}
    ledger.close_step(1, {"rollout-0": seconds}, wall_s=4.0, leases=table_of())
    totals = {phase: s for phase, s in ledger.totals["rollout-0"].items() if s}
    assert totals == {"decode": 3.0, "environment": 3.0}


def test_totals_and_lines_go_on_from_the_checkpoint(tmp_path):
    ledger, table = open_ledger(tmp_path), table_of()
    saved = {}
    for step in (1, 2, 3):
        train(table, table.grant_leases(2))
        ledger.close_step(
            step, {"learner": {"optimizer": 1.0, "idle": 1.0}}, wall_s=2.0, leases=table
        )
        if step == 2:
            saved = through_json({"ledger": ledger.state(), "book": table.state()})
    ledger.close_log()

    ledger = open_ledger(tmp_path)
    table = LeaseTable.restore(saved["book"], DataOrder.of_one(0, 10))
    assert ledger.restore(saved["ledger"], step=2) == 1
    assert ledger.totals["learner"]["optimizer"] == 2.0
    train(table, table.grant_leases(2))
    ledger.close_step(3, {"learner": {"optimizer": 1.5, "idle": 0.5}}, wall_s=2.0, leases=table)
    assert ledger.totals["learner"]["optimizer"] == 3.5
    lines = read_lines(tmp_path / "ledger.jsonl")
    ended = [group_id for line in lines for group_id in line["groups"]["trained"]]
    assert ended == [f"g{index:08d}" for index in range(6)]
    (aside,) = read_lines(tmp_path / "ledger.superseded.jsonl")
    assert aside["step"] == 3 and aside["superseded_by_resume_at"] == 2
