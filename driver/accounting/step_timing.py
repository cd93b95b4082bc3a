"""The seconds of every process up to the end of a step, so that each adds up to the same wall time.

A process may answer long after the request. So the request names the end of the step on the clock
of that process, and what the process did later counts in the next step. The offset between its
clock and the driver's is estimated from the same requests.
"""

import dataclasses
import math
import time
from collections.abc import Collection

from services.process.span_log import StepTiming

DRIFT = 1e-4
"""Seconds by which two hosts' clocks may drift apart per second; quartz is ten times better."""


class ClockOffset:
    """How many seconds the driver's monotonic clock is ahead of a process's.

    Each answer proves bounds: it was given after it was asked for and before it arrived. Within
    them the value stays what it is, since each change would be counted in a step. It begins with 0
    where that can be, as it is for processes of one host.
    """

    def __init__(self):
        self.seconds = 0.0
        self._low_s, self._high_s = -math.inf, math.inf
        self._seen_s: float | None = None

    def add_bounds(self, asked_s: float, theirs_s: float, answered_s: float) -> None:
        """Narrows the offset by the bounds that one answer proves.

        Args:
            asked_s, answered_s: by the driver's clock.
            theirs_s: by the clock of the process, somewhen between.
        """
        low_s, high_s = asked_s - theirs_s, answered_s - theirs_s
        if self._seen_s is None:
            self.seconds = (
                0.0 if low_s <= 0.0 <= high_s else high_s
            )  # an answer arrives soon after it was given
        else:
            drift_s = DRIFT * (answered_s - self._seen_s)
            wide = self._low_s - drift_s, self._high_s + drift_s
            if max(low_s, wide[0]) <= min(high_s, wide[1]):  # else a host slept
                low_s, high_s = max(low_s, wide[0]), min(high_s, wide[1])
        self._low_s, self._high_s, self._seen_s = low_s, high_s, answered_s
        self.seconds = min(max(self.seconds, low_s), high_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedTiming:
    """What one process did, and the offset that places it on the driver's clock."""

    timing: StepTiming
    ahead_s: float
    """To be added to its times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTiming:
    """What all processes did up to one moment."""

    at_s: float
    """The moment, on the driver's monotonic clock."""
    by_process: dict[str, PlacedTiming]
    """Of the processes that answered."""
    silent: frozenset[str]
    """Processes of the run without an answer: still starting, or too slow."""
    gaps: frozenset[str]
    """Processes that did not run during the whole step, or did not answer."""

    def seconds(self) -> dict[str, dict[str, float]]:
        """Seconds by process and phase; empty for processes that did not answer."""
        reported = {name: dict(one.timing.seconds) for name, one in self.by_process.items()}
        return reported | {name: {} for name in self.silent}


class TimingTable:
    """Processes that joined or left since the last step, and timings that no step counts yet."""

    def __init__(self):
        self._clocks: dict[str, ClockOffset] = {}
        self._gaps: set[str] = set()
        self._reported: dict[str, StepTiming] = {}

    def add_process(self, name: str, asked_s: float, clock_s: float) -> None:
        """Notes a process that has just answered that it is ready.

        Args:
            asked_s: time of the request, by the driver's clock.
            clock_s: its own clock in the answer.
        """
        self.remove_process(name)
        self._clocks[name] = ClockOffset()
        self._clocks[name].add_bounds(asked_s, clock_s, time.monotonic())
        self._reported.pop(name, None)

    def remove_process(self, name: str) -> None:
        """Notes that a process ended, or is about to start."""
        self._gaps.add(name)

    def local_s(self, name: str, at_s: float) -> float:
        """Converts a moment of the driver's clock to the clock of a process."""
        return at_s - self._clocks[name].seconds

    def add_timing(self, name: str, timing: StepTiming, asked_s: float) -> None:
        """Adds a timing that has just arrived; it counts in the next step that is closed."""
        self._clocks[name].add_bounds(asked_s, timing.taken_s, time.monotonic())
        before = self._reported.get(name)
        self._reported[name] = timing if before is None else before.followed_by(timing)

    def close_step(self, at_s: float, names: Collection[str]) -> RunTiming:
        """Returns, and forgets, everything that was reported since the last step.

        Args:
            at_s: end of the step, on the driver's monotonic clock.
            names: all processes of the run, running or not.
        """
        reported, self._reported = self._reported, {}
        silent = frozenset(name for name in names if name not in reported)
        gaps, self._gaps = self._gaps, set()
        return RunTiming(
            at_s=at_s,
            by_process={
                name: PlacedTiming(timing=timing, ahead_s=self._clocks[name].seconds)
                for name, timing in reported.items()
            },
            silent=silent,
            gaps=frozenset(gaps | silent),
        )
