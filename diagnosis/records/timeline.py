"""Reads timeline.jsonl: what each process did when, as tracks for the page or a Perfetto trace."""

import bisect
import dataclasses
import math
import pathlib
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from diagnosis.records.columns import number
from diagnosis.records.run_log import RunLog, natural
from diagnosis.records.span_arrays import (
    DECIMALS,
    json_rows,
    marks_of,
    spans_N3,
    thinned,
    without_overlaps,
)
from diagnosis.records.tail import Tail, TailChange, parse_line
from services.process.phases import LEARNER, PHASES

LAST_S = 60.0
"""Shown without a range."""
MOST_BYTES = 8 << 20
"""Of the log in one answer: it is parsed for each answer, at about 10 MB a second."""
MOST_SPANS = 4000
"""Of a track."""
MOST_GAUGES = 2000
STALENESS = "offpolicy/staleness_max"
_HEAD = re.compile(
    rb'\{"step": ?(\d{1,18}), ?"start": ?([-\d.e+]{1,32}), ?"end": ?([-\d.e+]{1,32})'
)
_STEPS_PID = 1


@dataclasses.dataclass(frozen=True)
class _Step:
    """One line of the log, with times in seconds after `start` of the whole range."""

    step: int
    start: float
    end: float
    record: Mapping[str, Any]


class TimelineLog:
    """Indexes the lines of timeline.jsonl by step. One thread at a time may use it."""

    def __init__(self, folder: pathlib.Path, log: RunLog | None = None):
        """Reads nothing yet; the file may be missing.

        Args:
            log: of the same run; it has the staleness of each step.
        """
        self._path = folder / "timeline.jsonl"
        self._log = log
        self._forget()

    def refresh(self) -> int | None:
        """Reads what was written since the last call; returns the last step, if any."""
        change = self._tail.poll()
        if change is TailChange.REPLACED:
            self._forget()
        for offset, line in self._tail.lines() if change is not TailChange.SAME else ():
            head = _HEAD.match(line)
            step, start, end = _head_of(head[1], head[2], head[3]) if head else _parsed(line)
            rises = not self._steps or step > self._steps[-1]
            if rises and math.isfinite(end - start):
                self._steps.append(step)
                self._starts.append(start)
                self._ends.append(end)
                self._offsets.append(offset)
                self._sizes.append(len(line))
        return self._steps[-1] if self._steps else None

    def timeline(
        self, *, first: int | None = None, last: int | None = None, last_s: float | None = None
    ) -> dict[str, Any]:
        """The document of /api/timeline; times are seconds after its `start`.

        Without arguments it covers the last minute. A track of more than MOST_SPANS spans is
        thinned: neighbours become one span of their dominant phase.

        Args:
            first: step number.
            last: step number, included.
            last_s: seconds before the end of the newest step, instead of step numbers; the answer
                has whole steps, up to MOST_BYTES of the log.

        Raises:
            ValueError: for an impossible range, or one of more than MOST_BYTES.
        """
        start, steps = self._read(first, last, last_s)
        return {
            "start": start if steps else None,
            "end": start + steps[-1].end if steps else None,
            "phases": list(PHASES),
            "steps": [
                {"step": one.step, "start": _round(one.start), "end": _round(one.end)}
                for one in steps
            ],
            "lanes": [_track(process, steps) for process in _processes(steps)],
            "gauges": _gauges(steps),
            "staleness": self._staleness(steps),
        }

    def trace(self, *, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """The document of /api/trace: events for Perfetto and chrome://tracing.

        Every process of the run is a process of the trace; times are microseconds after the first
        step's start, which `otherData` has as Unix seconds.

        Raises:
            ValueError: as `timeline`.
        """
        start, steps = self._read(first, last, None)
        events: list[dict[str, Any]] = _named(_STEPS_PID, "steps")
        for one in steps:
            events.append(_span_event(_STEPS_PID, f"step {one.step}", one.start, one.end, one.step))
        for pid, process in enumerate(_processes(steps), _STEPS_PID + 1):
            events += _named(pid, process)
            for one in steps:
                events += _process_events(pid, process, one)
        for one in steps:
            events += _gauge_events(one)
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"start_unix_s": start, "steps": [one.step for one in steps]},
        }

    def _forget(self) -> None:
        self._tail = Tail(self._path)
        self._steps, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._starts, self._ends = array("d"), array("d")

    def _read(
        self, first: int | None, last: int | None, last_s: float | None
    ) -> tuple[float, list[_Step]]:
        """Unix time at which the range starts, and its steps."""
        self.refresh()
        places = self._places(first, last, last_s)
        if not places:
            return 0.0, []
        start = self._starts[places[0]]
        steps = []
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return 0.0, []
        with file:
            for i in places:
                file.seek(self._offsets[i])
                record = parse_line(file.read(self._sizes[i]))
                if record is not None and record.get("step") == self._steps[i]:
                    times = self._starts[i] - start, self._ends[i] - start
                    steps.append(_Step(self._steps[i], *times, record))
        return start, steps

    def _places(self, first: int | None, last: int | None, last_s: float | None) -> range:
        by_step = first is not None or last is not None
        if by_step and last_s is not None:
            raise ValueError(
                f"last_s={last_s:g} cannot be combined with first or last: give one of both"
            )
        if first is not None and last is not None and first > last:
            raise ValueError(f"first={first} must not be after last={last}: swap them")
        if last_s is not None and not last_s > 0:
            raise ValueError(f"last_s={last_s:g} must be above 0")
        if not self._steps:
            return range(0)
        if not by_step:
            since = self._ends[-1] - (LAST_S if last_s is None else last_s)
            begin = bisect.bisect_right(self._ends, since)
            return range(max(begin, self._least_that_fits()), len(self._steps))
        begin = 0 if first is None else bisect.bisect_left(self._steps, first)
        end = len(self._steps) if last is None else bisect.bisect_right(self._steps, last)
        size = sum(self._sizes[begin:end])
        if size > MOST_BYTES:
            fit = max(1, (end - begin) * MOST_BYTES // size)
            raise ValueError(
                f"the timeline of {end - begin} steps has {size / 2**20:.0f} MB: at most "
                f"{MOST_BYTES >> 20} MB can be shown at once, which is about {fit} steps"
            )
        return range(begin, max(begin, end))

    def _least_that_fits(self) -> int:
        """Index of the oldest step from which all steps fit into MOST_BYTES."""
        place, size = len(self._sizes), 0
        while place and (size := size + self._sizes[place - 1]) <= MOST_BYTES:
            place -= 1
        return min(place, len(self._sizes) - 1)

    def _staleness(self, steps: Sequence[_Step]) -> list[list[float]]:
        """End of each step, and the greatest staleness of the groups that it trained on."""
        if self._log is None or not steps:
            return []
        known = self._log.steps
        values = self._log.column(STALENESS)
        by_step = dict(zip(known.tolist(), values.tolist(), strict=True))
        found = ((one.end, by_step.get(one.step, math.nan)) for one in steps)
        return [[_round(end), value] for end, value in found if math.isfinite(value)]


def _track(process: str, steps: Sequence[_Step]) -> dict[str, Any]:
    segments = [(one.start, _of(one.record, process)) for one in steps]
    marks = [[_round(start + at), text] for start, one in segments for at, text in marks_of(one)]
    spans = thinned(without_overlaps(spans_N3(segments)), MOST_SPANS)
    return {"process": process, "spans": json_rows(spans), "marks": marks}


def _gauges(steps: Sequence[_Step]) -> dict[str, list[Any]]:
    rows = [(one.start + at, *counts) for one in steps for at, *counts in _gauge_rows(one)]
    rows = rows[:: max(1, math.ceil(len(rows) / MOST_GAUGES))]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    names = ("waiting", "out", "policy_version")
    counts = {name: list(column) for name, column in zip(names, columns[1:], strict=True)}
    return {"t": [_round(at) for at in columns[0]], **counts}


def _gauge_rows(one: _Step) -> list[list[float]]:
    rows = [row for row in _list(one.record.get("gauges")) if isinstance(row, list)]
    numbers = [[number(value) for value in row] for row in rows if len(row) == 4]
    return [row for row in numbers if all(map(math.isfinite, row))]


def _process_events(pid: int, process: str, one: _Step) -> list[dict[str, Any]]:
    track = _of(one.record, process)
    events = []
    for phase, begin, seconds in spans_N3([(one.start, track)]).tolist():
        events.append(_span_event(pid, PHASES[int(phase)], begin, begin + seconds, one.step))
    for at, text in marks_of(track):
        mark = {"name": text, "cat": "mark", "ph": "i", "s": "p", "pid": pid, "tid": 1}
        events.append({**mark, "ts": _microseconds(one.start + at)})
    return events


def _gauge_events(one: _Step) -> list[dict[str, Any]]:
    names = ("groups waiting", "groups out", "policy version")
    return [
        {
            "name": name,
            "ph": "C",
            "pid": _STEPS_PID,
            "ts": _microseconds(one.start + at),
            "args": {"value": value},
        }
        for at, *values in _gauge_rows(one)
        for name, value in zip(names, values, strict=True)
    ]


def _span_event(pid: int, name: str, begin: float, end: float, step: int) -> dict[str, Any]:
    return {
        "name": name,
        "cat": "step" if pid == _STEPS_PID else "phase",
        "ph": "X",
        "pid": pid,
        "tid": 1,
        "ts": _microseconds(begin),
        "dur": _microseconds(end - begin),
        "args": {"step": step},
    }


def _named(pid: int, name: str) -> list[dict[str, Any]]:
    """Events with the name of a process of the trace and its place in the order."""
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 1, "args": {"name": name}},
        {
            "name": "process_sort_index",
            "ph": "M",
            "pid": pid,
            "tid": 1,
            "args": {"sort_index": pid},
        },
    ]


def _processes(steps: Sequence[_Step]) -> list[str]:
    """Every process of the steps: the learner, then the workers by number."""
    names = {name for one in steps for name in _mapping(one.record.get("processes"))}
    return sorted(names, key=lambda name: (name != LEARNER, natural(name)))


def _head_of(step: Any, start: Any, end: Any) -> tuple[int, float, float]:
    """Step, start and end of a line; NaN if they are not numbers."""
    try:
        return int(step), float(start), float(end)
    except (TypeError, ValueError, OverflowError):
        return -1, math.nan, math.nan


def _parsed(line: bytes) -> tuple[int, float, float]:
    """The same for a line with its keys in another order."""
    record = parse_line(line) or {}
    return _head_of(record.get("step"), record.get("start"), record.get("end"))


def _of(record: Mapping[str, Any], process: str) -> Mapping[str, Any]:
    return _mapping(_mapping(record.get("processes")).get(process))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _round(seconds: float) -> float:
    return round(seconds, DECIMALS)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
