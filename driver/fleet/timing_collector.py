"""Collects step timings from the actors of a run."""

import math
import time
from collections.abc import Callable, Collection, Mapping

from driver.accounting.awake_clock import AwakeClock
from driver.accounting.step_timing import RunTiming, TimingTable
from driver.fleet.actor_calls import ActorFailed, ActorLost, Call, NoAnswer, wait_for_calls
from driver.fleet.handles import LearnerHandle, WorkerHandle
from services.process.phases import LEARNER
from services.process.span_log import StepTiming

WORKER_S = 5.0
"""How long a step may wait for a worker's seconds."""
SIGNAL_POLL_S = 0.5
"""Between two checks for a signal."""


class TimingCollector:
    """Requests timings from actors and adds what arrives to a table."""

    def __init__(self, clock: AwakeClock):
        """Args:
        clock: of deadlines.
        """
        self._clock = clock
        self.table = TimingTable()
        self._open: dict[Call[StepTiming], tuple[str, float]] = {}
        """Process and time of the request, by the call that is under way."""
        self._closed_s = -math.inf
        """End of the last step that was closed, by the driver's clock."""

    def add_process(
        self, name: str, actor: LearnerHandle | WorkerHandle, asked_s: float, clock_s: float
    ) -> None:
        """Notes a process that has just answered that it is ready.

        It may have been ready before the last step was closed, and that step counted it as absent:
        what it did then is taken from it, so that it does not count in the next.

        Args:
            asked_s: time of the request, by the driver's clock.
            clock_s: its own clock in the answer.
        """
        self.table.add_process(name, asked_s, clock_s)
        if math.isfinite(self._closed_s):
            actor.take_timing(self.table.local_s(name, self._closed_s))

    def request(self, name: str, actor: LearnerHandle | WorkerHandle, at_s: float) -> None:
        """Asks a process for what it did up to a moment of the driver's clock."""
        call = actor.take_timing(self.table.local_s(name, at_s))
        self._open[call] = (name, time.monotonic())

    def collect(
        self,
        actors: Mapping[str, LearnerHandle | WorkerHandle],
        names: Collection[str],
        *,
        timeout_s: float,
        check: Callable[[], None],
    ) -> RunTiming:
        """Returns the timings of all processes up to now.

        Timings that arrived before a failure are kept for the next call.

        Args:
            actors: the running ones, the learner among them.
            names: all processes of the run.
            timeout_s: how long the learner may take.
            check: called while it waits; raises to end the wait.

        Raises:
            ActorLost: if the learner's process is gone.
            ActorFailed: if it raised an error of its own.
            NoAnswer: if it does not answer.
        """
        at_s, asked_at = time.monotonic(), self._clock.now()
        for name, actor in actors.items():
            self.request(name, actor, at_s)
        while self._open:
            self._receive(wait_for_calls(self._open, SIGNAL_POLL_S))
            late_s = self._clock.now() - asked_at
            if late_s > WORKER_S:
                self._open = {c: who for c, who in self._open.items() if who[0] == LEARNER}
            if self._open:
                check()
            if self._open and late_s > timeout_s:
                self._open = {}  # another process will be asked in place of this one
                raise NoAnswer(f"the learner did not answer 'take_timing' within {timeout_s:g} s")
        self._closed_s = at_s
        return self.table.close_step(at_s, names)

    def _receive(self, ended: Collection[Call[object]]) -> None:
        for call in [call for call in self._open if call in ended]:
            name, asked_s = self._open.pop(call)
            try:
                self.table.add_timing(name, call.result(), asked_s)
            except (ActorLost, ActorFailed):
                if name == LEARNER:
                    raise
                # The fleet notices the loss of a worker by its other calls.
