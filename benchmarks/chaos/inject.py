"""Makes one fault happen to real processes."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

from benchmarks.chaos.job import POLL_S, ROOT, DriverJob, WaitTimeout
from benchmarks.chaos.open_steps import OpenSteps, stopped
from benchmarks.chaos.schedule import BESIDE, IN_EPISODES, POINTS, Fault, FaultKind
from driver.reports.status import ExitCode
from learner.durable.frames import frame
from services.process import failpoints

GRACE_S = 30.0
"""What a cloud gives a spot machine between SIGTERM and SIGKILL."""
FIRE_S = 90.0
"""How long a failpoint may wait for its place in the run to be reached."""
LASTING_STEPS = 2
"""A lasting fault ends early when this number of steps was closed in spite of it."""
INTERVAL_S = 0.1
SLOWNESS = 10
"""A slow worker runs for one of this number of equal intervals."""
FEWEST, MOST = 1, 4
"""Workers between which a run is scaled."""
SCALE_S = 60
HOSTILE = "scorer"
"""File in the folder of the failpoints that makes one scorer hostile (`slow_scorer.py`)."""
TORN_BYTES = 4096
MEMORY_GROUPS = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")
"""Where a control group of memory is made, in the first and in the second version of them."""


class UnexpectedBehaviour(RuntimeError):
    """The run reacted to a fault in another way than it must."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """Time and step at which a fault hit."""

    at_s: float
    """Monotonic."""
    step: int
    """The last that may be closed without it."""


class Injector:
    """Makes every kind of fault happen."""

    def __init__(self, job: DriverJob, folder: str, steps: pathlib.Path):
        """Args:
        job: that the faults hit.
        folder: of its failpoints.
        steps: folder in which its environments say when they are at a step.
        """
        self._job = job
        self._folder = folder
        self._open_steps = OpenSteps(job, steps, FIRE_S * job.patience)
        self._scaling: _Scaling | None = None

    def inject(self, fault: Fault) -> Hit:
        """Makes a fault happen; one that lasts is over when this returns.

        Raises:
            WaitTimeout: if the fault could not hit, or what must follow at once did not.
            UnexpectedBehaviour: if a command or an exit code says that the run failed.
        """
        if fault.kind in POINTS:
            self._arm(fault)
            step = self._job.closed_step() + (fault.kind in BESIDE)
            return Hit(at_s=time.monotonic(), step=step)
        if fault.kind in IN_EPISODES:
            self._open_steps.hit(fault)
            return Hit(at_s=time.monotonic(), step=self._job.closed_step())
        hit = Hit(at_s=time.monotonic(), step=self._job.closed_step())
        self._actions(hit)[fault.kind](fault)
        return hit

    def wait_for_scaling(self) -> None:
        """Waits until a change of the number of workers is complete.

        Raises:
            UnexpectedBehaviour: if it failed although no driver was replaced.
        """
        scaling, self._scaling = self._scaling, None
        if scaling is None:
            return
        try:
            output, _ = scaling.process.communicate(timeout=SCALE_S * self._job.patience + 60)
        finally:
            scaling.process.kill()
        undisturbed = self._job.starts == scaling.starts and self._job.exit_code is None
        if scaling.process.returncode and undisturbed:
            raise UnexpectedBehaviour(
                f"driver.scale ended with code {scaling.process.returncode}: {output.strip()}"
            )

    def _actions(self, hit: Hit) -> dict[FaultKind, Callable[[Fault], None]]:
        job = self._job

        def lasting(fault: Fault) -> Callable[[], bool]:
            end = hit.at_s + fault.seconds
            return lambda: time.monotonic() < end and job.closed_step() < hit.step + LASTING_STEPS

        return {
            FaultKind.DRIVER_KILLED: lambda fault: self._kill_driver(),
            FaultKind.DRIVER_TERMINATED: lambda fault: self._terminate_driver(),
            FaultKind.WORKER_SLOW: lambda f: slow_down(_one(job.workers(), f), lasting(f)),
            FaultKind.WORKER_STALLED: lambda f: stall(_one(job.workers(), f), lasting(f)),
            FaultKind.LEARNER_STALLED: lambda f: stall(job.learner(), lasting(f)),
            FaultKind.REWARD_KILLED: lambda f: _one(job.reward_processes(), f).kill(),
            FaultKind.REWARD_STALLED: lambda f: stall(_one(job.reward_processes(), f), lasting(f)),
            FaultKind.SCALED_UP: lambda fault: self._scale(+1, hit),
            FaultKind.SCALED_DOWN: lambda fault: self._scale(-1, hit),
            FaultKind.SPOOL_TORN: self._lose_power,
            FaultKind.SCORER_HOSTILE: lambda fault: self._attack(),
            FaultKind.DRIVER_PAUSED: lambda f: pause(psutil.Process(job.driver_pid), f.seconds),
            FaultKind.WORKER_PAUSED: lambda f: pause(_one(job.workers(), f), f.seconds),
            FaultKind.LEARNER_PAUSED: lambda f: pause(job.learner(), f.seconds),
            FaultKind.WORKER_OUT_OF_MEMORY: lambda f: starve(_one(job.workers(), f)),
            FaultKind.WORKER_HOST_LOST: lambda f: job.lose_host(_one(job.workers(), f)),
            FaultKind.LEARNER_HOST_LOST: lambda f: job.lose_host(job.learner()),
        }

    def _arm(self, fault: Fault) -> None:
        point, _ = POINTS[fault.kind]
        armed = failpoints.arm(self._folder, point, fault.action)
        fire_s = FIRE_S * self._job.patience
        deadline = time.monotonic() + fire_s
        while not failpoints.fired(self._folder, point):
            self._job.check_running(f"before {point} was reached")
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{point} was not reached within {fire_s:g} s")
            time.sleep(POLL_S)
        for mark in armed.parent.glob(f"{point}.*.fired"):
            mark.unlink()

    def _kill_driver(self) -> None:
        self._job.kill()
        self._job.submit()

    def _lose_power(self, fault: Fault) -> None:
        """Ends driver and learner, and leaves half a record, or zeros, behind the last one."""
        learner = self._job.learner()
        self._job.kill()
        learner.wait(FIRE_S * self._job.patience)
        segments = (self._job.folder / "spool").glob("step-*.bin")
        newest = max(segments, key=lambda path: path.stat().st_mtime)
        torn = frame(os.urandom(2 * TORN_BYTES))[:TORN_BYTES]
        with newest.open("ab") as file:
            file.write(bytes(TORN_BYTES) if fault.choice < 0.5 else torn)
        self._job.submit()

    def _attack(self) -> None:
        """Waits until a scorer has turned hostile."""
        armed = pathlib.Path(self._folder, HOSTILE)
        armed.touch()
        deadline = time.monotonic() + FIRE_S * self._job.patience
        while armed.exists():
            self._job.check_running("before a scorer was hostile")
            if time.monotonic() > deadline:
                raise WaitTimeout(f"no scorer was called within {FIRE_S * self._job.patience:g} s")
            time.sleep(POLL_S)

    def _terminate_driver(self) -> None:
        code = self._job.terminate(GRACE_S * self._job.patience)
        if code != ExitCode.TERMINATED:
            raise UnexpectedBehaviour(
                f"the driver ended with code {code} after SIGTERM, {ExitCode.TERMINATED.value} "
                f"was expected: {self._job.log}"
            )
        self._job.submit()

    def _scale(self, change: int, hit: Hit) -> None:
        """Requests another number of workers. Returns when it is reached, or when steps were closed
        meanwhile, since a process takes longer to start than a step.
        """
        self.wait_for_scaling()
        running = len(self._job.workers())
        target = min(MOST, max(FEWEST, running + change))
        if target == running:
            target = running - change
        self._scaling = _Scaling.to(target, self._job)
        while self._job.closed_step() < hit.step + LASTING_STEPS:
            self._job.check_running("while its workers were scaled")
            if self._scaling.process.poll() is not None:
                return self.wait_for_scaling()
            time.sleep(POLL_S)


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """A running command that changes the number of workers."""

    process: subprocess.Popen
    starts: int
    """Of drivers, when it was given."""

    @classmethod
    def to(cls, target: int, job: DriverJob) -> "_Scaling":
        command = [sys.executable, "-m", "driver.scale", "--run", str(job.folder)]
        process = subprocess.Popen(
            [*command, "--rollout-workers", str(target), "--wait", f"{SCALE_S * job.patience:g}"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return cls(process, job.starts)


def stall(process: psutil.Process, lasts: Callable[[], bool]) -> None:
    """Stops a process while `lasts()`: its connections stay open and silent."""
    with stopped(process):
        while lasts():
            time.sleep(POLL_S)


def pause(process: psutil.Process, seconds: float) -> None:
    """Stops a process, as a host that is moved or a lid that is closed does."""
    with stopped(process):
        time.sleep(seconds)


def starve(process: psutil.Process) -> None:
    """Lets the kernel end a process that asks for memory; SIGKILL where no limit can be set."""
    for parent in MEMORY_GROUPS:
        group = parent / f"tandem-chaos-{process.pid}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / "cgroup.procs").write_text(str(process.pid))
                limits = ("memory.max", "memory.limit_in_bytes")
                limit = next(group / name for name in limits if (group / name).exists())
                limit.write_text("1M")
                process.wait(FIRE_S)
                return
            except (StopIteration, psutil.TimeoutExpired):
                continue
            finally:
                group.rmdir()
    process.kill()


def slow_down(process: psutil.Process, lasts: Callable[[], bool]) -> None:
    """Lets a process run for one of SLOWNESS equal intervals, while `lasts()`."""
    while lasts():
        with stopped(process):
            time.sleep(INTERVAL_S * (SLOWNESS - 1) / SLOWNESS)
        time.sleep(INTERVAL_S / SLOWNESS)


def _one(processes: Sequence[psutil.Process], fault: Fault) -> psutil.Process:
    """The process that is hit."""
    if not processes:
        raise UnexpectedBehaviour(f"there is no process for: {fault.kind.value}")
    return processes[int(fault.choice * len(processes))]
