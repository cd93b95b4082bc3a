import json
import random

import pytest

from driver.jsonl import read_lines
from driver.ledger import LeaseBook, LedgerError, StepLedger, TrajectoryState
from rollout_worker.order import prompt_at
from services.phase_clock import PHASES

TRAINED = TrajectoryState.TRAINED


def open_ledger(folder, warnings=None, fraction=0.05):
    warn = pytest.fail if warnings is None else warnings.append
    return StepLedger(folder, unexplained_fraction=fraction, warn=warn)


def book_of(count=10, seed=0):
    return LeaseBook(seed=seed, prompt_count=count)


def through_json(state):
    return json.loads(json.dumps(state))


def train(book, leases):
    for lease in leases:
        assert book.end(lease.group_id, TRAINED) is TRAINED


def order_index(lease):
    return int(lease.group_id[1:])


def test_c03_resume_trains_what_was_in_flight_and_nothing_twice(cases):
    case = cases("checkpoint")["C03"]["input"]
    count, per_step = case["prompts"], case["prompts_per_step"]
    book = book_of(count)
    positions = []
    for _ in range(case["checkpoint_at_step"]):
        leases = book.lease(per_step)
        positions += [lease.position for lease in leases]
        train(book, leases)
    ahead = book.lease(len(case["prompts_already_handed_to_workers_when_saved"]))
    assert [order_index(lease) for lease in ahead] == [6, 7, 8, 9]
    saved = through_json(book.state())

    resumed = LeaseBook.restore(saved, seed=0, prompt_count=count)
    expected = cases("checkpoint")["C03"]["expected"]
    first = resumed.lease(per_step)
    assert [order_index(lease) for lease in first] == expected["next_trained_prompts"]
    assert [lease.attempt for lease in first] == [1, 1]
    assert first[0].position == ahead[0].position
    train(resumed, first)
    second = resumed.lease(per_step)
    train(resumed, second)
    positions += [lease.position for lease in first + second]
    assert sorted(positions) == expected["trained_exactly_once_in_the_epoch"]
    (next_epoch,) = resumed.lease(1)
    assert (next_epoch.epoch, order_index(next_epoch)) == (1, 10)


def test_leases_follow_the_data_order_across_epochs():
    book = book_of(count=3, seed=7)
    leases = book.lease(8)
    assert [(x.epoch, x.position) for x in leases] == [prompt_at(7, 3, i) for i in range(8)]
    assert [x.epoch for x in leases] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len({x.group_id for x in leases}) == 8


def test_what_comes_back_is_leased_first_and_counts_its_attempt():
    book = book_of()
    leases = book.lease(4)
    train(book, leases[1:2])
    assert book.give_back() == 3 and book.outstanding == 0
    again = book.lease(4)
    assert [(order_index(x), x.attempt) for x in again] == [(0, 1), (2, 1), (3, 1), (4, 0)]
    book.check()


def test_each_group_ends_once_and_later_deliveries_are_duplicates():
    book = book_of()
    first, second = book.lease(2)
    assert book.end(first.group_id, TrajectoryState.DROPPED_STALE) is TrajectoryState.DROPPED_STALE
    assert book.end(first.group_id, TRAINED) is TrajectoryState.DUPLICATE
    assert book.end(second.group_id, TrajectoryState.DUPLICATE) is TrajectoryState.DUPLICATE
    assert book.outstanding == 1  # a repeated push does not end what is still to be trained
    book.end(second.group_id, TRAINED)
    book.check()
    assert book.totals == {
        "trained": 1,
        "dropped_stale": 1,
        "dropped_zero_variance": 0,
        "dropped_error": 0,
        "duplicate": 2,
    }


def test_a_group_that_was_given_back_may_still_arrive():
    book = book_of()
    (lease,) = book.lease(1)
    book.give_back()
    assert book.end(lease.group_id, TRAINED) is TRAINED
    assert [order_index(x) for x in book.lease(1)] == [1]
    book.check()


@pytest.mark.parametrize("group_id", ["g00000005", "g5", "x", "", "g-0000001"])
def test_a_group_that_was_never_leased_cannot_end(group_id):
    book = book_of()
    book.lease(5)
    with pytest.raises(LedgerError, match="was never leased: the next new group is g00000005"):
        book.end(group_id, TRAINED)


def test_a_lost_lease_breaks_the_conservation_law_with_all_numbers():
    book = book_of()
    train(book, book.lease(2))
    book.lease(3)
    book._outstanding.popitem()
    with pytest.raises(
        LedgerError, match="5 groups were leased, but 2 ended, 2 are out and 0 wait"
    ):
        book.check()


@pytest.mark.parametrize("seed", range(5))
def test_any_history_with_crashes_trains_every_index_once(seed):
    random_ = random.Random(seed)
    book, saved = book_of(count=7, seed=seed), None
    trained, trained_when_saved = [], []
    for _ in range(200):
        event = random_.random()
        if event < 0.1:
            book.give_back()
        elif event < 0.2:
            saved, trained_when_saved = through_json(book.state()), list(trained)
        elif event < 0.3 and saved:
            book = LeaseBook.restore(saved, seed=seed, prompt_count=7)
            trained = list(trained_when_saved)
        else:
            leases = book.lease(random_.randint(1, 4))
            done = leases[: random_.randint(0, len(leases))]
            train(book, done)
            trained += [order_index(lease) for lease in done]
        book.check()
    book.give_back()
    while True:
        (lease,) = book.lease(1)
        train(book, [lease])
        trained.append(order_index(lease))
        if not book.state()["unfinished"]:
            break
    assert sorted(trained) == list(range(book.cursor))


@pytest.mark.parametrize("changed", [{"seed": 1}, {"prompt_count": 11}])
def test_a_checkpoint_of_another_order_is_refused(changed):
    state = book_of().state()
    with pytest.raises(ValueError, match="the checkpoint was made with (seed=0|prompt_count=10)"):
        LeaseBook.restore(state, **({"seed": 0, "prompt_count": 10} | changed))


def test_phases_of_every_process_add_up_to_the_step(tmp_path):
    ledger = open_ledger(tmp_path)
    book = book_of()
    leases = book.lease(2)
    train(book, leases)
    record = ledger.close(
        4,
        {
            "learner": {"forward_backward": 6.0, "idle": 3.75, "unexplained": 0.2},
            "rollout-0": {"decode": 3.5, "idle": 6.5},
        },
        wall_s=10.0,
        book=book,
    )
    for row in record.processes.values():
        assert set(row) == set(PHASES)
        assert sum(row.values()) == pytest.approx(10.0, abs=1e-12)
    assert record.processes["learner"]["unexplained"] == 0.25
    assert record.warnings == () and record.overlap_s == {}
    assert record.groups == {"trained": ["g00000000", "g00000001"]}
    assert (record.busy_s("learner"), record.busy_s("rollout-0")) == (6.0, 3.5)
    (line,) = read_lines(tmp_path / "ledger.jsonl")
    assert line["step"] == 4 and line["groups"]["trained"] == ["g00000000", "g00000001"]
    assert sum(line["processes"]["rollout-0"].values()) == pytest.approx(10.0)


def test_seconds_without_a_phase_warn_above_the_threshold(tmp_path):
    warnings = []
    ledger = open_ledger(tmp_path, warnings)
    ledger.close(1, {"learner": {"idle": 9.5}}, wall_s=10.0, book=book_of())
    assert warnings == []
    record = ledger.close(2, {"learner": {"idle": 9.4}}, wall_s=10.0, book=book_of())
    assert warnings == [
        "step 2: 0.60 of 10.00 s of learner belong to no phase; log.unexplained_fraction=0.05 "
        "allows 0.50 s"
    ]
    assert record.warnings == tuple(warnings)


def test_seconds_counted_twice_warn_and_are_kept(tmp_path):
    warnings = []
    ledger = open_ledger(tmp_path, warnings)
    record = ledger.close(
        1, {"rollout-1": {"decode": 8.0, "wire": 3.0}}, wall_s=10.0, book=book_of()
    )
    assert record.overlap_s == {"rollout-1": 1.0}
    row = record.processes["rollout-1"]
    assert row["unexplained"] == 0 and sum(row.values()) == 11.0
    assert "add up to 11.00 s of a step that took 10.00 s" in warnings[0]


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
        ledger.close(3, {"learner": phase_s}, wall_s=wall_s, book=book_of())
    assert read_lines(tmp_path / "ledger.jsonl") == []


def test_totals_and_lines_go_on_from_the_checkpoint(tmp_path):
    ledger, book = open_ledger(tmp_path), book_of()
    saved = {}
    for step in (1, 2, 3):
        train(book, book.lease(2))
        ledger.close(step, {"learner": {"optimizer": 1.0, "idle": 1.0}}, wall_s=2.0, book=book)
        if step == 2:
            saved = through_json({"ledger": ledger.state(), "book": book.state()})
    ledger.close_log()

    ledger = open_ledger(tmp_path)
    book = LeaseBook.restore(saved["book"], seed=0, prompt_count=10)
    assert ledger.restore(saved["ledger"], step=2) == 1
    assert ledger.totals["learner"]["optimizer"] == 2.0
    train(book, book.lease(2))
    ledger.close(3, {"learner": {"optimizer": 1.5, "idle": 0.5}}, wall_s=2.0, book=book)
    assert ledger.totals["learner"]["optimizer"] == 3.5
    lines = read_lines(tmp_path / "ledger.jsonl")
    ended = [group_id for line in lines for group_id in line["groups"]["trained"]]
    assert ended == [f"g{index:08d}" for index in range(6)]
    (aside,) = read_lines(tmp_path / "ledger.superseded.jsonl")
    assert aside["step"] == 3 and aside["superseded_by_resume_at"] == 2
