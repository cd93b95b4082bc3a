import json
import math

import pytest

from driver.accounting.jsonl import read_lines
from driver.accounting.queue_gauges import Gauge, QueueGauges
from driver.accounting.step_timing import PlacedTiming, RunTiming
from driver.reports.timeline import MOST_GAUGES, Timeline, timeline_record
from services.process.phases import PHASES
from services.process.span_log import Mark, Span, StepTiming, seconds_of


def placed(spans, marks=(), ahead_s=0.0) -> PlacedTiming:
    seconds = dict.fromkeys(PHASES, 0.0) | seconds_of(spans)
    timing = StepTiming(
        start_s=spans[0].start_s,
        end_s=spans[-1].end_s,
        taken_s=spans[-1].end_s + 0.5,
        seconds=seconds,
        spans=tuple(spans),
        marks=tuple(marks),
    )
    return PlacedTiming(timing=timing, ahead_s=ahead_s)


def step_timings(at_s: float, **processes: PlacedTiming) -> RunTiming:
    return RunTiming(at_s=at_s, by_process=processes, silent=frozenset(), gaps=frozenset())


TWO = step_timings(
    510.0,
    learner=placed(
        [Span("idle", 500.0, 507.5), Span("forward_backward", 507.5, 510.0)],
        [Mark(500.25, "published 6"), Mark(510.0, "version 7")],
    ),
    worker=placed(
        [Span("decode", 20.00004, 22.0), Span("unexplained", 22.0, 30.0)],
        [Mark(21.0, "version 6")],
        ahead_s=480.0,
    ),
)


def test_every_process_is_aligned_to_the_drivers_clock():
    gauges = [Gauge(499.9, 0, 16, 6), Gauge(505.0, 12, 4, 6)]
    record = timeline_record(7, TWO, gauges, start_s=500.0, unix_s=1_700_000_010.0)
    idle, forward, decode, unexplained = (
        PHASES.index(name) for name in ("idle", "forward_backward", "decode", "unexplained")
    )
    assert record == {
        "step": 7,
        "start": 1_700_000_000.0,
        "end": 1_700_000_010.0,
        "processes": {
            "learner": {
                "spans": [[idle, 0.0, 7.5], [forward, 7.5, 2.5]],
                "marks": [[0.25, "published 6"], [10.0, "version 7"]],
            },
            "worker": {
                "spans": [[decode, 0.0, 2.0], [unexplained, 2.0, 8.0]],
                "marks": [[1.0, "version 6"]],
            },
        },
        "gauges": [[-0.1, 0, 16, 6], [5.0, 12, 4, 6]],
    }


def test_a_step_that_is_written_late_ended_when_its_timings_did(tmp_path, monkeypatch):
    monkeypatch.setattr("driver.reports.timeline.time.monotonic", lambda: 512.5)
    monkeypatch.setattr("driver.reports.timeline.time.time", lambda: 1_700_000_012.5)
    timeline = Timeline(tmp_path, enabled=True)
    timeline.record_step(1, TWO, [], start_s=500.0)
    timeline.close_log()
    (line,) = read_lines(tmp_path / "timeline.jsonl")
    assert (line["start"], line["end"]) == (1_700_000_000.0, 1_700_000_010.0)


def test_a_silent_process_has_no_spans_and_the_step_is_written_all_the_same(tmp_path):
    timeline = Timeline(tmp_path, enabled=True)
    timings = RunTiming(
        at_s=510.0,
        by_process={"learner": TWO.by_process["learner"]},
        silent=frozenset({"rollout-0"}),
        gaps=frozenset({"rollout-0"}),
    )
    timeline.record_step(1, timings, [], start_s=500.0)
    timeline.close_log()
    (line,) = read_lines(tmp_path / "timeline.jsonl")
    assert set(line["processes"]) == {"learner"} and line["gauges"] == []
    assert line["end"] - line["start"] == pytest.approx(10.0)


def test_a_resume_moves_later_lines_aside(tmp_path):
    timeline = Timeline(tmp_path, enabled=True)
    for step in (1, 2, 3):
        timeline.record_step(step, TWO, [], start_s=500.0)
    assert timeline.rewind(1) == 2
    timeline.record_step(2, TWO, [], start_s=500.0)
    timeline.close_log()
    assert [line["step"] for line in read_lines(tmp_path / "timeline.jsonl")] == [1, 2]
    aside = read_lines(tmp_path / "timeline.superseded.jsonl")
    assert [line["step"] for line in aside] == [2, 3]


def test_a_disabled_timeline_writes_no_file(tmp_path):
    timeline = Timeline(tmp_path, enabled=False)
    timeline.record_step(1, TWO, [], start_s=500.0)
    assert timeline.rewind(0) == 0
    timeline.close_log()
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_eight_busy_workers_stays_a_short_line():
    spans = [Span(PHASES[i % 2], i / 20, (i + 1) / 20) for i in range(200)]
    timings = step_timings(10.0, **{f"rollout-{i}": placed(spans) for i in range(8)})
    record = timeline_record(1, timings, [], start_s=0.0, unix_s=0.0)
    assert len(json.dumps(record)) < 40_000
    for track in record["processes"].values():
        assert sum(length for _, _, length in track["spans"]) == pytest.approx(10.0, abs=1e-6)


def test_a_long_step_keeps_few_gauges():
    queues = QueueGauges()
    for count in range(20_000):
        queues.record_counts(count, 0, 1)
    seen = queues.take_gauges()
    assert len(seen) <= 4096 and (seen[0].waiting, seen[-1].waiting) == (0, 19_999)
    record = timeline_record(1, TWO, seen, start_s=500.0, unix_s=0.0)
    assert len(record["gauges"]) == MOST_GAUGES
    assert all(math.isfinite(one[0]) for one in record["gauges"])
