"""Hits processes while environments are at a step, so that episodes wait between two turns."""

import contextlib
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from benchmarks.chaos.job import DriverJob, WaitTimeout
from benchmarks.chaos.schedule import Fault, FaultKind
from benchmarks.chaos.sum_episodes import hung_records, steps_under_way

POLL_S = 0.01


class _Aim(NamedTuple):
    """What a kind hits."""

    fewest: int
    """Steps that must be under way."""
    ends_itself: bool = False
    """It is not killed: it stays stopped until the run has killed it."""


AIMS = {
    FaultKind.WORKER_KILLED_WAITING: _Aim(1),
    FaultKind.LEARNER_KILLED_WAITING: _Aim(1),
    FaultKind.ENVIRONMENT_KILLED: _Aim(1),
    # A call that is alone in a process which does not answer ends its episode with an error.
    FaultKind.ENVIRONMENT_STOPPED: _Aim(2, ends_itself=True),
}


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Stopped in this block; a process that ended meanwhile is no error."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


class OpenSteps:
    """The steps of environments of one run that are under way."""

    def __init__(self, job: DriverJob, folder: pathlib.Path, bound_s: float):
        """Args:
        job: the run.
        folder: gets the files of its environments (`sum_episodes.py`).
        bound_s: how long to wait for steps that a fault can hit.
        """
        self._job = job
        self._folder = folder
        self._bound_s = bound_s
        self._hung = 0
        """Faults of environments that hang by themselves, so far."""

    def hit(self, fault: Fault) -> None:
        """Ends a process while environments are at a step.

        It is stopped first: a step that is still under way then is so when it ends. Where an
        environment hangs by itself, this waits until it does.

        Raises:
            WaitTimeout: if there was no such moment, or a hung process was not killed.
        """
        if fault.kind is FaultKind.ENVIRONMENT_HUNG:
            return self._wait_hung()
        aim = AIMS[fault.kind]
        for pid in self._pids(fault.kind.value):
            target = self._target(fault.kind, pid)
            if target is None:
                continue
            with stopped(target):
                if self._count(pid) < aim.fewest:
                    continue
                if not aim.ends_itself:
                    target.kill()
                self._wait_gone(target, fault.kind.value)
                return

    def _wait_hung(self) -> None:
        deadline = time.monotonic() + self._bound_s
        self._hung += 1
        while hung_records(self._folder) < self._hung:
            self._check(deadline, "an environment that hangs")

    def _pids(self, what: str) -> Iterator[int]:
        """Processes of environments at a step, again and again."""
        deadline = time.monotonic() + self._bound_s
        while True:
            yield from {mark.pid for mark in steps_under_way(self._folder)}
            self._check(deadline, f"steps that are under way: {what}")

    def _check(self, deadline: float, what: str) -> None:
        self._job.check_running(f"before {what}")
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {self._bound_s:g} s for {what}")
        time.sleep(POLL_S)

    def _count(self, pid: int) -> int:
        return sum(mark.pid == pid for mark in steps_under_way(self._folder))

    def _target(self, kind: FaultKind, pid: int) -> psutil.Process | None:
        """The process that is to be hit; None where the environment's has ended."""
        try:
            environment = psutil.Process(pid)
            if environment.status() == psutil.STATUS_ZOMBIE:
                return None
            above = {parent.pid for parent in environment.parents()}
        except psutil.NoSuchProcess:
            return None
        if kind is FaultKind.LEARNER_KILLED_WAITING:
            return self._job.learner()
        if kind is FaultKind.WORKER_KILLED_WAITING:
            return next((one for one in self._job.workers() if one.pid in above), None)
        return environment

    def _wait_gone(self, process: psutil.Process, what: str) -> None:
        try:
            process.wait(self._bound_s)
        except psutil.TimeoutExpired:
            raise WaitTimeout(f"{what}: it was not ended within {self._bound_s:g} s") from None
