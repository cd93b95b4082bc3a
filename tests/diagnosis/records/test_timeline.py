"""What each process did when, for the page and for Perfetto."""

import itertools
import json

import numpy as np
import pytest

from benchmarks.made_run.made_run import MadeRun, make_run
from benchmarks.made_run.made_steps import RunPlan
from diagnosis.records import span_arrays, timeline
from diagnosis.records.run_log import RunLog
from diagnosis.records.timeline import TimelineLog
from services.process.phases import PHASES

pytestmark = pytest.mark.slow

DECODE = PHASES.index("decode")


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder of 30 steps."""
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, steps=30, workers=2, max_staleness=1)
    return folder


def test_one_step_is_shown_as_it_stands_in_the_log(run):
    record = lines(run / "timeline.jsonl")[7]
    shown = TimelineLog(run).timeline(first=7, last=7)
    assert (shown["start"], shown["end"]) == pytest.approx((record["start"], record["end"]))
    assert shown["steps"] == [
        {"step": 7, "start": 0.0, "end": pytest.approx(shown["end"] - shown["start"], abs=1e-4)}
    ]
    assert [track["process"] for track in shown["lanes"]] == ["learner", "rollout-0", "rollout-1"]
    for track in shown["lanes"]:
        written = record["processes"][track["process"]]
        np.testing.assert_allclose(track["spans"], written["spans"], atol=2e-4)
        assert track["marks"] == written["marks"]
    waiting = [row[1] for row in record["gauges"]]
    assert shown["gauges"]["waiting"] == waiting
    assert shown["gauges"]["policy_version"] == [7] * len(waiting)


def test_steps_follow_each_other_in_seconds_after_the_first(run):
    records = lines(run / "timeline.jsonl")
    shown = TimelineLog(run).timeline(first=5, last=8)
    starts = [record["start"] - records[5]["start"] for record in records[5:9]]
    assert [one["start"] for one in shown["steps"]] == pytest.approx(starts, abs=1e-3)
    learner = shown["lanes"][0]["spans"]
    assert all(a[1] + a[2] <= b[1] + 2e-4 for a, b in itertools.pairwise(learner))
    written = sum(len(record["processes"]["learner"]["spans"]) for record in records[5:9])
    assert len(learner) == written


def test_the_last_seconds_are_whole_steps(run):
    ends = [record["end"] for record in lines(run / "timeline.jsonl")]
    shown = TimelineLog(run).timeline(last_s=3.0)
    assert [one["step"] for one in shown["steps"]] == [
        step for step, end in enumerate(ends) if end > ends[-1] - 3.0
    ]


def test_without_a_range_the_last_minute_is_shown(run):
    assert TimelineLog(run).timeline() == TimelineLog(run).timeline(last_s=60.0)


def test_staleness_is_what_the_metrics_say_at_the_end_of_each_step(run):
    log = RunLog(run)
    log.refresh()
    shown = TimelineLog(run, log).timeline(first=1, last=3)
    ends = [one["end"] for one in shown["steps"]]
    assert shown["staleness"] == [[ends[0], 0.0], [ends[1], 1.0], [ends[2], 1.0]]


def test_what_is_appended_is_shown_and_what_is_rewound_is_not(tmp_path):
    made = MadeRun(tmp_path, RunPlan())
    made.write_step()
    known = TimelineLog(tmp_path)
    assert len(known.timeline()["steps"]) == 1
    made.write_step()
    assert known.refresh() == 1 == known.refresh()
    assert [one["step"] for one in known.timeline(first=0, last=9)["steps"]] == [0, 1]
    path = tmp_path / "timeline.jsonl"
    first, second = lines(path)
    again = second | {"end": second["end"] + 5.0, "step": 3}
    (tmp_path / "new").write_text(json.dumps(first) + "\n" + json.dumps(again) + "\n")
    (tmp_path / "new").replace(path)
    assert [one["step"] for one in known.timeline(first=0, last=9)["steps"]] == [0, 3]
    path.unlink()
    assert known.refresh() is None


def test_a_run_without_a_timeline_is_empty(tmp_path):
    shown = TimelineLog(tmp_path).timeline()
    assert shown["start"] is None and shown["steps"] == shown["lanes"] == []
    assert TimelineLog(tmp_path).trace()["otherData"]["steps"] == []


def test_lines_that_are_no_timeline_are_left_out(tmp_path):
    odd = {
        "end": 9.0,
        "start": 5.0,
        "step": 1,
        "processes": {
            "learner": {
                "spans": [
                    [1, 0.0, 1.0],
                    [99, 1.0, 1.0],
                    ["1", 2.0],
                    None,
                    [1, "NaN", 1],
                    [2, 3, -1],
                ],
                "marks": [[0.5, "version 1"], ["x", "y"], 7],
            },
            "rollout-0": None,
        },
        "gauges": [[0.0, 1, 2, 3], [1, 2], "x", [1, None, 2, 3]],
    }
    texts = ['{"step": 0, "start": ', "7", '{"step": 0}', json.dumps(odd), '{"step": 1}']
    (tmp_path / "timeline.jsonl").write_text("\n".join(texts) + "\n")
    shown = TimelineLog(tmp_path).timeline(first=0)
    assert shown["steps"] == [{"step": 1, "start": 0.0, "end": 4.0}]
    learner, worker = shown["lanes"]
    assert learner["spans"] == [[DECODE, 0.0, 1.0]] and learner["marks"] == [[0.5, "version 1"]]
    assert worker == {"process": "rollout-0", "spans": [], "marks": []}
    assert shown["gauges"]["waiting"] == [1]


@pytest.mark.parametrize(
    "query, message",
    [
        ({"first": 3, "last": 2}, "first=3 must not be after last=2: swap them"),
        (
            {"first": 3, "last_s": 2.0},
            "last_s=2 cannot be combined with first or last: give one of both",
        ),
        ({"last_s": 0.0}, "last_s=0 must be above 0"),
    ],
)
def test_a_range_that_cannot_be_is_refused(run, query, message):
    with pytest.raises(ValueError, match=message):
        TimelineLog(run).timeline(**query)


def test_too_many_steps_are_refused_by_number_and_cut_by_seconds(run, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_BYTES", 10_000)
    with pytest.raises(
        ValueError, match="timeline of 31 steps .* can be shown at once, which is about"
    ):
        TimelineLog(run).timeline(first=0)
    shown = [one["step"] for one in TimelineLog(run).timeline(last_s=1e6)["steps"]]
    assert shown[-1] == 30 and 2 < len(shown) < 15


def test_a_trace_has_every_span_and_mark_of_its_steps(run):
    """Fields: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    records = lines(run / "timeline.jsonl")[3:6]
    found = TimelineLog(run).trace(first=3, last=5)
    events = found["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == ["steps", "learner", "rollout-0", "rollout-1"]
    for process in ("learner", "rollout-1"):
        pid = next(pid for pid, name in named.items() if name == process)
        spans_s = [e["dur"] / 1e6 for e in events if e["ph"] == "X" and e["pid"] == pid]
        tracks_of = [record["processes"][process] for record in records]
        written_s = [s for track in tracks_of for _, _, s in track["spans"]]
        assert spans_s == pytest.approx(written_s, abs=1e-4)
        marks = [e["name"] for e in events if e["ph"] == "i" and e["pid"] == pid]
        assert marks == [text for track in tracks_of for _, text in track["marks"]]
    assert [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1] == [
        "step 3",
        "step 4",
        "step 5",
    ]
    assert sum(e["ph"] == "C" for e in events) == 3 * sum(len(r["gauges"]) for r in records)
    assert all(isinstance(e["ts"], float) for e in events if e["ph"] != "M")
    json.dumps(found, allow_nan=False)


@pytest.fixture
def busy():
    """Two hundred rounds of one long decode and many short spans of two phases, without a hole."""
    rng = np.random.default_rng(0)
    found, at = [], 0.0
    for _ in range(200):
        found.append([DECODE, at, 0.5])
        at += 0.5
        for _ in range(100):
            seconds = float(rng.exponential(0.002))
            found.append([int(rng.choice([2, 3], p=[0.6, 0.4])), at, seconds])
            at += seconds
    return np.array(found)


def test_thinning_keeps_time_long_spans_and_the_share_of_each_phase(busy):
    thinned = span_arrays.thinned(busy, 1000)
    assert 400 < len(thinned) <= 1000
    end = thinned[:, 1] + thinned[:, 2]
    np.testing.assert_allclose(end[:-1], thinned[1:, 1])
    assert end[-1] == pytest.approx(busy[-1, 1] + busy[-1, 2])
    assert np.isclose(thinned[thinned[:, 0] == DECODE, 2], 0.5).sum() == 200
    for phase in (2, 3):
        before = busy[busy[:, 0] == phase, 2].sum()
        assert thinned[thinned[:, 0] == phase, 2].sum() == pytest.approx(before, rel=0.03)


@pytest.mark.parametrize("most", [1, 7, 100, 20_199])
def test_thinning_holds_its_bound(busy, most):
    thinned = span_arrays.thinned(busy, most)
    assert 1 <= len(thinned) <= most
    assert thinned[:, 2].sum() == pytest.approx(busy[:, 2].sum())


def test_few_spans_stay_as_they_are(busy):
    assert span_arrays.thinned(busy, len(busy)) is busy
    assert len(span_arrays.thinned(busy[:0], 10)) == 0


def test_spans_that_overlap_take_turns():
    given = np.array([[1, 0.0, 2.0], [2, 1.0, 0.5], [3, 1.5, 1.0], [4, 3.0, 0.0]])
    assert span_arrays.without_overlaps(given).tolist() == [[1, 0.0, 2.0], [3, 2.0, 0.5]]
