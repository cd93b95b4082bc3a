"""The seconds of every process up to one moment, so that each adds up to the same wall time.

A process answers when it can, which may be a good deal after it was asked. So it is asked for its
seconds up to the moment at which the step ended, on its own clock, and what it did since goes into
the next step. How far its clock is from the driver's is learned from the questions themselves.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray

from driver.fleet import actors as ray_actors
from driver.fleet.actors import GONE, ActorFailed, NoAnswer
from services.process.span_log import StepTiming

LEARNER = "learner"
WORKER_S = 5.0
"""How long a step may wait for a worker's seconds."""
LOOK_S = 0.5
"""Between two looks for a signal."""
DRIFT = 1e-4
"""Seconds by which two hosts' clocks may part in a second; quartz is ten times better."""


class ClockGap:
    """How many seconds the driver's monotonic clock is ahead of a process's.

    Each answer proves bounds: it was given after it was asked for and before it arrived. Within
    them the value stays what it is, since each change would be counted in a step. It begins with 0
    where that can be, as it is for processes of one host.
    """

    def __init__(self):
        self.seconds = 0.0
        self._low_s, self._high_s = -math.inf, math.inf
        self._seen_s: float | None = None

    def learn(self, asked_s: float, theirs_s: float, answered_s: float) -> None:
        """Takes the bounds of one answer in.

        Args:
            asked_s, answered_s: by the driver's clock.
            theirs_s: by the clock of the process, somewhen between.
        """
        low_s, high_s = asked_s - theirs_s, answered_s - theirs_s
        if self._seen_s is None:
            self.seconds = 0.0 if low_s <= 0.0 <= high_s else high_s  # an answer is soon heard
        else:
            drift_s = DRIFT * (answered_s - self._seen_s)
            wide = self._low_s - drift_s, self._high_s + drift_s
            if max(low_s, wide[0]) <= min(high_s, wide[1]):  # else a host slept
                low_s, high_s = max(low_s, wide[0]), min(high_s, wide[1])
        self._low_s, self._high_s, self._seen_s = low_s, high_s, answered_s
        self.seconds = min(max(self.seconds, low_s), high_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedTiming:
    """What one process did, and where that lies on the driver's clock."""

    timing: StepTiming
    ahead_s: float
    """To be added to its times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTiming:
    """What all processes did up to one moment."""

    at_s: float
    """The moment, on the driver's monotonic clock."""
    by_process: dict[str, PlacedTiming]
    """Of those that answered."""
    silent: frozenset[str]
    """Processes of the run that said nothing: they are not there yet, or did not answer."""
    gaps: frozenset[str]
    """Processes that were not there all the time, or said nothing."""

    def seconds(self) -> dict[str, dict[str, float]]:
        """By process and phase; nothing for those that said nothing."""
        told = {name: dict(placed.timing.seconds) for name, placed in self.by_process.items()}
        return told | {name: {} for name in self.silent}


class TimingTable:
    """Who came and went since the last timing, and what was told but is in no step yet."""

    def __init__(self):
        self._clocks: dict[str, ClockGap] = {}
        self._gaps: set[str] = set()
        self._told: dict[str, StepTiming] = {}

    def came(self, name: str, asked_s: float, about: Mapping[str, Any]) -> None:
        """A process has just said of itself that it is ready, asked at `asked_s`."""
        self.gone(name)
        self._clocks[name] = ClockGap()
        self._clocks[name].learn(asked_s, about["clock_s"], time.monotonic())
        self._told.pop(name, None)

    def gone(self, name: str) -> None:
        """A process is there no more, or not yet."""
        self._gaps.add(name)

    def until_s(self, name: str, at_s: float) -> float:
        """A moment of the driver's clock on that of a process."""
        return at_s - self._clocks[name].seconds

    def hear(self, name: str, timing: StepTiming, asked_s: float) -> None:
        """Takes a timing that has just arrived; it counts in the next step that is closed."""
        self._clocks[name].learn(asked_s, timing.taken_s, time.monotonic())
        before = self._told.get(name)
        self._told[name] = timing if before is None else before.followed_by(timing)

    def close(self, at_s: float, names: Collection[str]) -> RunTiming:
        """Gives away what was told for one step.

        Args:
            names: of the processes that the run has, there or not.
        """
        told, self._told = self._told, {}
        silent = frozenset(name for name in names if name not in told)
        gaps, self._gaps = self._gaps, set()
        return RunTiming(
            at_s=at_s,
            by_process={
                name: PlacedTiming(timing=timing, ahead_s=self._clocks[name].seconds)
                for name, timing in told.items()
            },
            silent=silent,
            gaps=frozenset(gaps | silent),
        )


class TimingCollector:
    """Asks the actors of a run for their timings."""

    def __init__(self):
        self.book = TimingTable()
        self._open: dict[Any, tuple[str, float]] = {}
        """Calls under way: of whom, and asked when."""

    def ask(self, name: str, actor: Any, at_s: float) -> None:
        """Asks a process for what it did up to a moment of the driver's clock."""
        call = actor.take_timing.remote(self.book.until_s(name, at_s))
        self._open[call] = (name, time.monotonic())

    def take(
        self,
        actors: Mapping[str, Any],
        names: Collection[str],
        *,
        timeout_s: float,
        check: Callable[[], None],
    ) -> RunTiming:
        """The timings of all processes up to now.

        What was told before this fails is not lost: the next call has it.

        Args:
            actors: those that are there, the learner among them.
            names: of all that the run has.
            timeout_s: how long the learner may take.
            check: called while it waits; raises to end the wait.

        Raises:
            RayActorError, WorkerCrashedError: if the learner's process is gone.
            ActorFailed: if it raised an error of its own.
            NoAnswer: if it does not answer.
        """
        at_s = time.monotonic()
        for name, actor in actors.items():
            self.ask(name, actor, at_s)
        while self._open:
            self._hear(ray.wait([*self._open], timeout=LOOK_S)[0])
            late_s = time.monotonic() - at_s
            if late_s > WORKER_S:
                self._open = {c: who for c, who in self._open.items() if who[0] == LEARNER}
            if self._open:
                check()
            if self._open and late_s > timeout_s:
                raise NoAnswer(f"the learner did not answer 'take_timing' within {timeout_s:g} s")
        return self.book.close(at_s, names)

    def _hear(self, ended: Collection[Any]) -> None:
        for call in ended:
            name, asked_s = self._open.pop(call)
            try:
                self.book.hear(name, ray_actors.result_of(call, name, "take_timing"), asked_s)
            except (*GONE, ActorFailed):
                if name == LEARNER:
                    raise
                # Its news say so too.
