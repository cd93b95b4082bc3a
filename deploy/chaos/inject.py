"""Makes one fault happen to real processes."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

from deploy.chaos.job import POLL_S, ROOT, Job, TooLong
from deploy.chaos.schedule import POINTS, Fault, Kind
from driver.status import ExitCode
from services import failpoints

GRACE_S = 30.0
"""What a cloud gives a spot machine between SIGTERM and SIGKILL."""
FIRE_S = 90.0
"""How long a failpoint may wait for its place in the run to be reached."""
BEAT_S = 0.1
SLOWNESS = 10
"""A slow worker runs in every so many'th beat."""
FEWEST, MOST = 1, 4
"""Workers between which a run is scaled."""
SCALE_S = 60


class NotAsPromised(RuntimeError):
    """The run did something else than it should in this fault."""


class Injector:
    """Does what each kind of fault stands for."""

    def __init__(self, job: Job, folder: str):
        """
        Args:
            job: that the faults hit.
            folder: of its failpoints.
        """
        self._job = job
        self._folder = folder

    def inject(self, fault: Fault) -> float:
        """Returns the moment (monotonic) at which the fault hit; a stall has passed by then.

        Raises:
            TooLong: if the fault could not hit, or what must follow at once did not.
            NotAsPromised: if a command or an exit code says that the run failed.
        """
        if fault.kind in POINTS:
            return self._arm(fault)
        hit = time.monotonic()
        self._others()[fault.kind](fault)
        return hit

    def _others(self) -> dict[Kind, Callable[[Fault], None]]:
        return {
            Kind.DRIVER_KILLED: self._kill_driver,
            Kind.DRIVER_TERMINATED: self._terminate_driver,
            Kind.WORKER_SLOW: lambda f: slow_down(self._one(self._job.workers(), f), f.seconds),
            Kind.WORKER_STALLED: lambda f: stall(self._one(self._job.workers(), f), f.seconds),
            Kind.LEARNER_STALLED: lambda f: stall(self._job.learner(), f.seconds),
            Kind.REWARD_KILLED: lambda f: self._one(self._job.reward_processes(), f).kill(),
            Kind.REWARD_STALLED: lambda f: stall(
                self._one(self._job.reward_processes(), f), f.seconds
            ),
            Kind.SCALED_UP: lambda f: self._scale(+1),
            Kind.SCALED_DOWN: lambda f: self._scale(-1),
        }

    def _arm(self, fault: Fault) -> float:
        point, _ = POINTS[fault.kind]
        armed = failpoints.arm(self._folder, point, fault.action)
        deadline = time.monotonic() + FIRE_S
        while not failpoints.fired(self._folder, point):
            self._job.check(f"before {point} was reached")
            if time.monotonic() > deadline:
                raise TooLong(f"{point} was not reached within {FIRE_S:g} s")
            time.sleep(POLL_S)
        for mark in armed.parent.glob(f"{point}.*.fired"):
            mark.unlink()
        return time.monotonic()

    def _kill_driver(self, fault: Fault) -> None:
        self._job.kill()
        self._job.submit()

    def _terminate_driver(self, fault: Fault) -> None:
        code = self._job.terminate(GRACE_S)
        if code != ExitCode.TERMINATED:
            raise NotAsPromised(
                f"the driver ended with code {code} after SIGTERM, {ExitCode.TERMINATED.value} "
                f"was due: {self._job.log}"
            )
        self._job.submit()

    def _scale(self, change: int) -> None:
        there = len(self._job.workers())
        target = min(MOST, max(FEWEST, there + change))
        if target == there:
            target = there - change
        command = [sys.executable, "-m", "driver.scale", "--run", str(self._job.folder)]
        done = subprocess.run(
            [*command, "--rollout-workers", str(target), "--wait", str(SCALE_S)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SCALE_S + 60,
        )
        if done.returncode:
            raise NotAsPromised(
                f"driver.scale to {target} workers ended with code {done.returncode}: "
                f"{done.stderr.strip() or done.stdout.strip()}"
            )

    def _one(self, processes: Sequence[psutil.Process], fault: Fault) -> psutil.Process:
        """The process that is hit."""
        if not processes:
            raise NotAsPromised(f"there is no process for: {fault.kind.value}")
        return processes[int(fault.choice * len(processes))]


def stall(process: psutil.Process, seconds: float) -> None:
    """Stops a process for so long: its connections stay open and say nothing."""
    with _stopped(process):
        time.sleep(seconds)


def slow_down(process: psutil.Process, seconds: float) -> None:
    """Lets a process run in one of SLOWNESS beats, for so long in all."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with _stopped(process):
            time.sleep(BEAT_S * (SLOWNESS - 1) / SLOWNESS)
        time.sleep(BEAT_S / SLOWNESS)


@contextlib.contextmanager
def _stopped(process: psutil.Process):
    """A process that has ended meanwhile is none to go on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
