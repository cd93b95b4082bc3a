"""A run's logs, read while they are written, rewound and broken."""

import json
import math
import os
import tracemalloc

import numpy as np
import pytest

from benchmarks.made_run.made_run import MadeRun, make_run
from benchmarks.made_run.made_steps import RunPlan
from diagnosis.records.run_log import RunLog
from driver.accounting.jsonl import JsonlLog
from services.process.phases import PHASES

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    """A run that has written steps 0 to 5 of 40, and its log after the first look."""
    made = MadeRun(tmp_path, RunPlan(steps=40))
    for _ in range(6):
        made.write_step()
    log = RunLog(tmp_path)
    log.refresh()
    return made, log


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(facts):
    return [one.step for one in facts]


@pytest.mark.parametrize("workers", [1, 8])
def test_every_step_comes_back_as_it_was_written(tmp_path, workers):
    make_run(tmp_path, steps=25, workers=workers)
    log = RunLog(tmp_path)
    changes = log.refresh()
    assert numbers(changes.new_steps) == list(range(26)) and not changes.reloaded
    for facts, ledger, metrics in zip(
        changes.new_steps,
        lines(tmp_path / "ledger.jsonl"),
        lines(tmp_path / "metrics.jsonl"),
        strict=True,
    ):
        assert facts.time == metrics.pop("time") and facts.step == metrics.pop("step")
        assert dict(facts.metrics) == metrics
        assert facts.processes == ledger["processes"]
        assert facts.wall_s == ledger["wall_s"] and facts.overlap_s == ledger["overlap_s"]
        assert facts.absent_s == ledger["absent_s"]
        assert facts.groups == {state: len(ids) for state, ids in ledger["groups"].items()}
        assert log.groups(facts.step) == ledger["groups"]


def test_only_what_was_appended_is_new(run):
    made, log = run
    assert numbers(log.refresh().new_steps) == []
    made.write_step()
    changes = log.refresh()
    assert numbers(changes.new_steps) == [6] and not changes.reloaded
    assert log.last_step == 6 and numbers(log.recent(2)) == [5, 6]
    assert log.step(7) is None


def test_a_step_is_known_once_both_of_its_lines_are_there(run, tmp_path):
    made, log = run
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    made.write_step()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    os.truncate(tmp_path / "metrics.jsonl", len(metrics))
    assert numbers(log.refresh().new_steps) == []
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(whole[len(metrics) :])
    assert numbers(log.refresh().new_steps) == [6]


def test_a_torn_line_waits_for_its_rest(run, tmp_path):
    made, log = run
    before = (tmp_path / "metrics.jsonl").stat().st_size
    made.write_step()
    line = (tmp_path / "metrics.jsonl").read_bytes()[before:]
    os.truncate(tmp_path / "metrics.jsonl", before)
    seen = []
    for i in range(0, len(line), len(line) // 3):
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(line[i : i + len(line) // 3])
        seen += numbers(log.refresh().new_steps)
    assert seen == [6] and log.skipped["metrics.jsonl"] == 0


def test_a_rewound_log_is_read_anew(run, tmp_path):
    _made, log = run
    for name in ("metrics", "ledger"):
        rewound = JsonlLog(tmp_path / f"{name}.jsonl")
        rewound.rewind(3)
        rewound.close()
    changes = log.refresh()
    assert changes.reloaded and numbers(changes.new_steps) == [0, 1, 2, 3]
    assert log.last_step == 3 and not log.refresh().reloaded


def test_a_log_rewound_between_two_looks_and_longer_since_is_read_anew(run, tmp_path):
    """A copy in place keeps the inode, and may be as long as before."""
    _made, log = run
    path = tmp_path / "metrics.jsonl"
    other = [record | {"train/loss": 7.0} for record in lines(path)]
    before = path.stat()
    path.write_text("".join(json.dumps(record) + "\n" * 99 for record in other))
    assert path.stat().st_size > before.st_size and path.stat().st_ino == before.st_ino
    changes = log.refresh()
    assert changes.reloaded and log.column("train/loss")[-1] == 7.0


def test_a_log_replaced_by_one_of_the_same_size_is_read_anew(run, tmp_path):
    _made, log = run
    path = tmp_path / "metrics.jsonl"
    text = path.read_text()
    (tmp_path / "new").write_text(
        text.replace('"train/sequences": 128.0', '"train/sequences": 127.0')
    )
    (tmp_path / "new").replace(path)
    assert path.stat().st_size == len(text)
    assert log.refresh().reloaded and log.column("train/sequences")[-1] == 127.0


def test_a_log_cut_short_in_place_is_read_anew(run, tmp_path):
    _made, log = run
    path = tmp_path / "ledger.jsonl"
    os.truncate(path, sum(map(len, path.read_text().splitlines(True)[:4])))
    changes = log.refresh()
    assert changes.reloaded and numbers(changes.new_steps) == [0, 1, 2, 3]


def test_a_deleted_log_leaves_no_step(run, tmp_path):
    _made, log = run
    (tmp_path / "ledger.jsonl").unlink()
    changes = log.refresh()
    assert changes.reloaded and numbers(changes.new_steps) == [] and log.last_step == 0


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b'{"step": 6, "time": 1.0, "half": ',
        b"[1, 2]",
        b'{"time": 1.0}',
        b'{"step": "six"}',
        b'{"step": 2}',
        b'{"step": 5, "wall_s": 1.0, "processes": {}}',
        b'{"step": 6.5}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"step": 1e999}',
    ],
)
def test_a_line_that_is_no_record_is_skipped_and_counted(run, tmp_path, line):
    made, log = run
    for name in ("metrics", "ledger"):
        with (tmp_path / f"{name}.jsonl").open("ab") as file:
            file.write(line + b"\n")
    made.write_step()
    assert numbers(log.refresh().new_steps) == [6]
    assert log.skipped == {"metrics.jsonl": 1, "ledger.jsonl": 1}


def test_what_is_not_finite_comes_back_as_itself(tmp_path):
    make_run(tmp_path, steps=8, nonfinite=True)
    log = RunLog(tmp_path)
    log.refresh()
    fourth, sixth = log.step(4), log.step(6)
    assert fourth is not None and math.isnan(fourth.metrics["train/loss"])
    assert sixth is not None and sixth.metrics["offpolicy/is_weight_raw_max"] == math.inf
    assert sixth.metrics["reward/total/min"] == -math.inf
    assert log.steps[log.nonfinite("train/loss")].tolist() == [4]
    assert log.nonfinite("train/entropy").tolist() == []


def test_a_step_that_the_ledger_lacks_marks_no_other_one(run, tmp_path):
    _made, log = run
    of_metrics, of_ledger = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "ledger.jsonl")
    of_metrics[4] |= {"train/loss": "NaN"}
    del of_ledger[4]
    for name, records in (("metrics", of_metrics), ("ledger", of_ledger)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text)
    log.refresh()
    assert log.steps.tolist() == [0, 1, 2, 3, 5]
    assert log.nonfinite("train/loss").tolist() == []
    assert log.groups(4) == {} and log.groups(5) == of_ledger[4]["groups"]


@pytest.mark.parametrize(
    "value, expected",
    [
        ('"NaN"', math.nan),
        ("NaN", math.nan),
        ('"Infinity"', math.inf),
        ("1e999", math.inf),
        ("1" + "0" * 400, math.inf),
        ("true", 1.0),
        ("3", 3.0),
    ],
)
def test_every_way_to_write_a_number_is_read(run, tmp_path, value, expected):
    made, log = run
    made.write_step()
    path = tmp_path / "metrics.jsonl"
    text = path.read_text().rstrip("\n")
    path.write_text(text[:-1] + f', "mine": {value}}}\n')
    log.refresh()
    facts = log.step(6)
    assert facts is not None
    np.testing.assert_equal(facts.metrics["mine"], expected)


@pytest.mark.parametrize("value", ["null", '"text"', "[1]", '{"a": 1}'])
def test_what_is_no_number_is_absent(run, tmp_path, value):
    made, log = run
    made.write_step()
    path = tmp_path / "metrics.jsonl"
    changed = path.read_text().rstrip("\n")[:-1] + f', "mine": {value}, "train/loss": {value}}}\n'
    path.write_text(changed)
    log.refresh()
    before, facts = log.step(5), log.step(6)
    assert before is not None and "train/loss" in before.metrics
    assert facts is not None and "mine" not in facts.metrics and "mine" not in log.metric_names
    assert "train/loss" not in facts.metrics and log.nonfinite("train/loss").tolist() == []


def test_columns_hold_what_the_metrics_log_holds(tmp_path):
    make_run(tmp_path, steps=25, workers=1, workers_to=2)
    log = RunLog(tmp_path)
    log.refresh()
    records = lines(tmp_path / "metrics.jsonl")
    names = {name for record in records for name in record} - {"step", "time"}
    assert set(log.metric_names) == names
    for name in names:
        expected = [record.get(name, math.nan) for record in records]
        np.testing.assert_array_equal(log.column(name), expected, name)


def test_a_worker_is_absent_in_the_steps_without_it(tmp_path):
    make_run(tmp_path, steps=20, workers=1, workers_to=12)
    log = RunLog(tmp_path)
    log.refresh()
    assert log.processes == ["learner", *(f"rollout-{i}" for i in range(12))]
    early, late = log.step(1), log.step(20)
    assert early is not None and early.workers == ["rollout-0"]
    assert late is not None and len(late.workers) == 12
    assert np.isnan(log.seconds("rollout-11")[1]).all()


def test_a_ledger_line_of_few_phases_is_filled_up(run, tmp_path):
    made, log = run
    made.write_step()
    path = tmp_path / "ledger.jsonl"
    *kept, last = lines(path)
    last |= {"wall_s": 3.0, "processes": {"learner": {"idle": 1.0, "optimizer": 0.5}}}
    path.write_text("".join(json.dumps(record) + "\n" for record in [*kept, last]))
    log.refresh()
    facts = log.step(6)
    assert facts is not None and list(facts.processes["learner"]) == list(PHASES)
    assert facts.processes["learner"]["unexplained"] == 1.5


def test_status_and_configuration_are_read_when_they_change(run, tmp_path):
    made, log = run
    assert log.status["state"] == "running" and log.settings.prompts_per_step == 16
    assert not log.refresh().status_changed
    made.end("failed", "no memory")
    assert log.refresh().status_changed
    assert (log.status["state"], log.status["reason"]) == ("failed", "no memory")
    (tmp_path / "config.yaml").write_text("rollout:\n  prompts_per_step: 3\n  day: 2026-01-02\n")
    log.refresh()
    assert log.settings.prompts_per_step == 3 and log.config["rollout"]["day"] == "2026-01-02"


@pytest.mark.parametrize("name", ["status.json", "config.yaml"])
def test_a_file_that_is_cut_short_changes_nothing(run, tmp_path, name):
    _made, log = run
    before = (log.status, log.config)
    (tmp_path / name).write_text('{"run": [')
    log.refresh()
    assert (log.status, log.config) == before


def test_an_empty_folder_is_a_run_without_steps(tmp_path):
    log = RunLog(tmp_path)
    changes = log.refresh()
    assert (numbers(changes.new_steps), changes.reloaded, log.last_step) == ([], False, 0)
    assert (log.status, log.config, log.metric_names, log.recent(5)) == ({}, {}, [], [])


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder: give the output folder"):
        RunLog(tmp_path / "nowhere")


def test_a_hostile_run_is_only_text(tmp_path):
    make_run(tmp_path, steps=6, hostile=True)
    log = RunLog(tmp_path)
    log.refresh()
    assert log.last_step == 6 and log.skipped == {"ledger.jsonl": 0, "metrics.jsonl": 0}
    assert "reward/<script>window.attacked = true</script>/mean" in log.metric_names


def test_a_step_of_eight_workers_takes_under_five_kilobytes(tmp_path):
    make_run(tmp_path, steps=1500, workers=8, samples_per_step=0, timeline=False)
    tracemalloc.start()
    log = RunLog(tmp_path)
    log.refresh()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    rows = 2048  # columns grow by so many at once
    assert log.last_step == 1500 and held < rows * 5_000
