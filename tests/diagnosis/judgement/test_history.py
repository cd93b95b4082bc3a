"""The course of a run in few points."""

import json
import math
import statistics

import numpy as np
import pytest

from benchmarks.made_run.made_run import MadeRun, make_run
from benchmarks.made_run.made_steps import RunPlan
from diagnosis.judgement.breakdown import OTHER, critical_path
from diagnosis.judgement.history import PATH_PHASES, _round_digits, critical_paths, history
from diagnosis.records.run_log import RunLog
from services.process.phases import PHASES

pytestmark = pytest.mark.slow


def read(folder):
    log = RunLog(folder)
    log.refresh()
    return log


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Of 103 steps, with workers from 1 to 3."""
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, steps=103, workers=1, workers_to=3, samples_per_step=0, timeline=False)
    return read(folder)


def test_as_many_points_as_steps_are_the_steps_themselves(log):
    shown = history(log)
    assert (shown["first"], shown["last"], shown["bin"]) == (0, 103, 1)
    assert shown["steps"] == list(range(104))
    for i in (0, 1, 50, 103):
        facts = log.step(i)
        reward = facts.metrics.get("reward/total/mean")
        assert shown["metrics"]["reward/total/mean"][i] == (reward and pytest.approx(reward, 1e-4))
        assert shown["wall_s"][i] == pytest.approx(facts.wall_s, rel=1e-4)
    assert shown["low"] == shown["high"] == {}


def test_a_point_is_the_mean_of_its_steps_between_their_least_and_most(log):
    shown = history(log, first=1, last=100, points=10)
    assert shown["bin"] == 10 and shown["steps"] == list(range(1, 101, 10))
    name = "train/grad_norm"
    for i, start in enumerate(shown["steps"]):
        values = [log.step(n).metrics[name] for n in range(start, start + 10)]
        assert shown["metrics"][name][i] == pytest.approx(statistics.fmean(values), rel=1e-4)
        assert shown["low"][name][i] == pytest.approx(min(values), rel=1e-4)
        assert shown["high"][name][i] == pytest.approx(max(values), rel=1e-4)


def test_phases_of_a_process_add_up_to_the_wall_time(log):
    for points in (600, 7):
        shown = history(log, first=1, points=points)
        for i, row in enumerate(shown["seconds"]["learner"]):
            assert sum(row) == pytest.approx(shown["wall_s"][i], rel=1e-3)


def test_a_process_that_was_absent_is_null_and_does_not_dilute_its_mean(log):
    shown = history(log, first=1, last=103, points=3)
    assert shown["bin"] == 35  # the third worker comes at step 70, the last of the second bin
    rows = shown["seconds"]["rollout-2"]
    idle = shown["phases"].index("idle")
    assert rows[0] is None
    assert rows[1][idle] == pytest.approx(log.step(70).processes["rollout-2"]["idle"], abs=1e-5)


def test_a_metric_that_few_steps_measured_is_null_between(log):
    accuracy = history(log)["metrics"]["eval/accuracy/strict"]
    assert [i for i, value in enumerate(accuracy) if value is not None] == [0, 103]


def test_names_choose_metrics_and_unknown_ones_are_null(log):
    shown = history(log, names=["time/rollout-0/decode_s", "nobody"], first=5, last=6)
    decode_s = [log.step(n).processes["rollout-0"]["decode"] for n in (5, 6)]
    assert shown["metrics"]["time/rollout-0/decode_s"] == pytest.approx(decode_s, rel=1e-4)
    assert shown["metrics"]["nobody"] == [None, None]


def test_metrics_without_a_chart_are_not_sent(log):
    assert "time/rollout-0/decode_s" not in history(log)["metrics"]


@pytest.mark.parametrize("points, place", [(600, 4), (3, 1)])
def test_what_is_not_finite_is_marked_and_stays_text(tmp_path, points, place):
    make_run(tmp_path, steps=8, nonfinite=True)
    shown = history(read(tmp_path), points=points)
    assert shown["nonfinite"]["train/loss"] == shown["nonfinite"]["train/grad_norm"] == [4]
    assert shown["nonfinite"]["offpolicy/is_weight_raw_max"] == [6]
    value = shown["metrics"]["train/loss"][place]
    assert value == "NaN" if points == 600 else isinstance(value, float)
    json.dumps(shown, allow_nan=False)


def test_a_point_of_nothing_but_infinity_is_infinity(tmp_path):
    make_run(tmp_path, steps=4, samples_per_step=0)
    path = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["train/loss"] = "-Infinity"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = history(read(tmp_path), points=1)
    assert shown["metrics"]["train/loss"] == ["-Infinity"]
    assert shown["nonfinite"]["train/loss"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_critical_path_is_that_of_each_step(tmp_path, max_staleness):
    make_run(tmp_path, steps=60, workers=1, workers_to=3, max_staleness=max_staleness)
    log = read(tmp_path)
    seconds = {name: log.seconds(name) for name in log.processes}
    paths = critical_paths(log.column("wall_s"), seconds)
    for path, step in zip(paths, log.steps.tolist(), strict=True):
        expected = critical_path(log.step(step))
        assert dict(zip(PATH_PHASES, path, strict=True)) == pytest.approx(
            dict.fromkeys(PATH_PHASES, 0.0) | expected
        )


def test_critical_path_of_made_up_seconds_is_that_of_each_step(tmp_path):
    """Sides that overlap, workers that only wait, steps without a worker or without a learner."""
    rng = np.random.default_rng(0)
    run = MadeRun(tmp_path, RunPlan(steps=300, workers=3, samples_per_step=0, timeline=False))
    for _ in range(301):
        run.write_step()
    run.end()
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    for record in records:
        for name in list(record["processes"]):
            if rng.random() < 0.2:
                del record["processes"][name]
                continue
            used = rng.integers(0, 2, len(PHASES))
            seconds = rng.exponential(rng.choice([0.02, 0.2]), len(PHASES)) * used
            record["processes"][name] = dict(zip(PHASES, seconds.tolist(), strict=True))
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "ledger.jsonl").write_text(text)
    log = read(tmp_path)
    paths = critical_paths(
        log.column("wall_s"), {name: log.seconds(name) for name in log.processes}
    )
    for path, step in zip(paths, log.steps.tolist(), strict=True):
        expected = dict.fromkeys(PATH_PHASES, 0.0) | critical_path(log.step(step))
        assert dict(zip(PATH_PHASES, path, strict=True)) == pytest.approx(expected), step


def test_path_and_its_rest_add_up_to_the_wall_time(log):
    shown = history(log, first=1, points=20)
    assert shown["path_phases"][-1] == OTHER
    for wall_s, path in zip(shown["wall_s"], shown["path"], strict=True):
        assert sum(path) == pytest.approx(wall_s, rel=1e-3)


def test_bins_are_the_same_for_runs_of_any_length_where_the_range_does_not_shrink(log, tmp_path):
    make_run(tmp_path, steps=31, samples_per_step=0)
    long = history(log, first=0, last=103, points=20, shrink=False)
    short = history(read(tmp_path), first=0, last=103, points=20, shrink=False)
    assert short["bin"] == long["bin"] and short["steps"] == long["steps"][: len(short["steps"])]


@pytest.mark.parametrize("first, last", [(None, None), (200, None), (200, 300)])
def test_a_range_without_steps_is_empty(log, tmp_path, first, last):
    for one in [read(tmp_path)] + [log] * (first is not None):
        shown = history(one, first=first, last=last, names=["train/loss"])
        assert shown["steps"] == shown["path"] == [] and shown["metrics"] == {"train/loss": []}


@pytest.mark.parametrize(
    "query, message",
    [
        ({"points": 0}, "points=0 must be between 1 and 5000"),
        ({"first": 5, "last": 4}, "first=5 must not be after last=4: swap them"),
    ],
)
def test_a_range_that_cannot_be_is_refused(log, query, message):
    with pytest.raises(ValueError, match=message):
        history(log, **query)


@pytest.mark.parametrize(
    "value", [0.0, 1.0, -123456.7, 0.000123456, 1e-17, 6.5432123e15, 2.0**60, 0.1 + 0.2, 99999.6]
)
def test_rounding_keeps_five_digits(value):
    assert float(_round_digits(np.array([value]))[0]) == float(f"{value:.5g}")


def test_rounding_keeps_what_is_not_finite_and_does_not_fail_on_extremes():
    values = np.array([math.nan, math.inf, -math.inf, 5e-324, 1.7e308])
    rounded = _round_digits(values)
    np.testing.assert_array_equal(rounded[:3], values[:3])
    assert rounded[3] == 5e-324 and rounded[4] == pytest.approx(1.7e308, rel=1e-4)


def test_many_steps_of_eight_workers_take_what_their_points_take(tmp_path):
    """Four steps a point: the size of the document depends on the points, not on the steps."""
    make_run(tmp_path, steps=2100, workers=8, samples_per_step=0, timeline=False)
    shown = history(read(tmp_path), points=600)
    assert len(shown["steps"]) == 526 and shown["bin"] == 4
    assert len(json.dumps(shown, separators=(",", ":"), allow_nan=False)) < 1_500_000
