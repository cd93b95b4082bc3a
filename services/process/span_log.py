"""What a process did when: spans of phases that touch each other, and marks between them.

`PhaseClock` writes them; a `StepTiming` carries them, thinned to the number that a page can show.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_SPANS = 200
"""Per step timing."""
MOST_MARKS = 100
"""Per step timing; the newest stay."""
LEAST_SPAN_S = 5e-4
"""A shorter span is nothing that a person could see in a step."""
FINEST_SHARE = 1 / 2000
"""Nor is a smaller share of the interval."""
_MOST_KEPT = 4096
"""Spans between two timings; with more, those that are not among the newest are thinned."""
_NEWEST = 1024
_THINNED = 512


class Span(NamedTuple):
    """Seconds that belong to one phase, on the clock of the process."""

    phase: str
    start_s: float
    end_s: float


class Mark(NamedTuple):
    """Something that happened at one moment, such as `version 7`."""

    at_s: float
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTiming:
    """What a process did from one moment to another, on its own monotonic clock."""

    start_s: float
    end_s: float
    taken_s: float
    """When it was taken; later than end_s where an earlier moment was asked for."""
    seconds: dict[str, float]
    """By phase, all of PHASES; they add up to end_s - start_s."""
    spans: tuple[Span, ...] = ()
    """From start_s to end_s without a hole, at most MOST_SPANS: roughly what `seconds` adds up."""
    marks: tuple[Mark, ...] = ()

    def followed_by(self, later: "StepTiming") -> "StepTiming":
        """Both as one."""
        spans = thinned((*self.spans, *later.spans), most=MOST_SPANS)
        return StepTiming(
            start_s=self.start_s,
            end_s=later.end_s,
            taken_s=later.taken_s,
            seconds={phase: s + self.seconds[phase] for phase, s in later.seconds.items()},
            spans=tuple(spans),
            marks=(*self.marks, *later.marks)[-MOST_MARKS:],
        )


class SpanLog:
    """Spans since the last cut; memory is bounded however long that is ago."""

    def __init__(self, start_s: float):
        self._start_s = start_s
        self._exact_from_s = start_s
        self._phases: list[str] = []
        self._ends: list[float] = []

    def add_span(self, phase: str, end_s: float) -> None:
        """Gives the time since the last span to a phase."""
        if self._phases and self._phases[-1] == phase:
            self._ends[-1] = end_s
            return
        self._phases.append(phase)
        self._ends.append(end_s)
        if len(self._ends) > _MOST_KEPT:
            self._thin()

    def cut(self, at_s: float) -> tuple[list[Span], list[Span]]:
        """Ends the log at a moment and starts the next one there.

        Args:
            at_s: brought into the time that the log covers, and after what was thinned of it.

        Returns:
            the spans before and after the moment; the next log has the latter.
        """
        last_s = self._ends[-1] if self._ends else self._start_s
        at_s = min(max(at_s, self._exact_from_s), last_s)
        before, after = [], []
        for span in self._spans():
            if span.end_s <= at_s:
                before.append(span)
            elif span.start_s >= at_s:
                after.append(span)
            else:
                before.append(span._replace(end_s=at_s))
                after.append(span._replace(start_s=at_s))
        self._hold(after, at_s)
        self._exact_from_s = at_s
        return before, after

    @property
    def start_s(self) -> float:
        """Where it begins: at the last cut."""
        return self._start_s

    def _spans(self) -> list[Span]:
        starts = [self._start_s, *self._ends][: len(self._ends)]
        return [Span(*one) for one in zip(self._phases, starts, self._ends, strict=True)]

    def _hold(self, spans: Sequence[Span], start_s: float) -> None:
        self._start_s = start_s
        self._phases = [span.phase for span in spans]
        self._ends = [span.end_s for span in spans]

    def _thin(self) -> None:
        spans = self._spans()
        old, new = spans[:-_NEWEST], spans[-_NEWEST:]
        self._exact_from_s = old[-1].end_s
        self._hold([*thinned(old, most=_THINNED), *new], self._start_s)


def seconds_of(spans: Iterable[Span]) -> dict[str, float]:
    """By phase."""
    seconds: dict[str, float] = {}
    for phase, start_s, end_s in spans:
        seconds[phase] = seconds.get(phase, 0.0) + end_s - start_s
    return seconds


def thinned(spans: Sequence[Span], *, most: int) -> list[Span]:
    """Fewer spans that cover the same time: runs of short ones become one span each.

    A run goes to one of the phases in it, to that which most seconds are owed to, those of earlier
    runs included: so each phase keeps about the seconds that it had, and a phase of many short
    spans does not vanish behind one that has a little more. Long spans stay about as they are.

    Args:
        spans: each begins where the one before ends.
        most: how many there may be, at least 1.
    """
    if not spans:
        return []
    lengths_s = [end_s - start_s for _, start_s, end_s in spans]
    grain_s = max(LEAST_SPAN_S, FINEST_SHARE * (spans[-1].end_s - spans[0].start_s))
    while len(starts := _runs(lengths_s, grain_s)) > most:
        grain_s *= 2
    ends = [*starts[1:], len(spans)]
    runs = [spans[start:end] for start, end in zip(starts, ends, strict=True)]
    return _merged(_settled(runs))


def _runs(lengths_s: Sequence[float], grain_s: float) -> list[int]:
    """Where runs begin, each of which has the grain: a span that has it alone is one, unless
    shorter ones before it wait for company.
    """
    starts: list[int] = []
    run_s = grain_s
    """Of the run that is growing."""
    for index, length_s in enumerate(lengths_s):
        if run_s >= grain_s:
            starts.append(index)
            run_s = 0.0
        run_s += length_s
    if run_s < grain_s and len(starts) > 1:
        starts.pop()
    return starts


def _settled(runs: Iterable[Sequence[Span]]) -> list[Span]:
    owed: dict[str, float] = {}
    found = []
    for run in runs:
        for phase, seconds in seconds_of(run).items():
            owed[phase] = owed.get(phase, 0.0) + seconds
        phase = max({span.phase: None for span in run}, key=lambda name: owed[name])
        found.append(Span(phase, run[0].start_s, run[-1].end_s))
        owed[phase] -= run[-1].end_s - run[0].start_s
    return found


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of one phase as one."""
    found = [spans[0]]
    for span in spans[1:]:
        if span.phase == found[-1].phase:
            found[-1] = found[-1]._replace(end_s=span.end_s)
        else:
            found.append(span)
    return found
