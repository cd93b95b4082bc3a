"""One run under a head: submitted, ended and resubmitted like a job, and watched from outside."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from benchmarks.chaos.ray_head import Head
from benchmarks.chaos.run_checks import read_lines
from services.process.stacks import request_stacks

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = pathlib.Path(__file__).with_name("run.yaml")
POLL_S = 0.05
QUIET_S = 240.0
"""A run that closes no step in this time hangs."""
STACKS_S = 10.0
LEARNER, WORKER = "LearnerActor", "RolloutActor"


class DriverEnded(RuntimeError):
    """The driver ended although it should have continued."""


class WaitTimeout(RuntimeError):
    """A wait exceeded its bound."""


class DriverJob:
    """Owns the driver's process; the run's folder and the head outlive it."""

    def __init__(
        self,
        head: Head,
        folder: pathlib.Path,
        settings: Sequence[str],
        patience: float = 1.0,
        config: pathlib.Path = CONFIG,
    ):
        """Args:
        head: that every driver joins.
        folder: of the run; the output of all its drivers goes to `driver.log` beside it.
        settings: `section.key=value` on top of the configuration.
        patience: every bound of time of this run is multiplied by it.
        config: of the run.
        """
        self.folder = folder
        self.log = folder.with_name(f"{folder.name}.driver.log")
        self.patience = patience
        self.starts = 0
        self._head = head
        self._config = config
        self._settings = [*settings, f"run.output_dir={folder}"]
        self._process: subprocess.Popen | None = None

    def submit(self) -> None:
        """Starts a driver: a new run at first, then with --resume."""
        chosen = [part for setting in self._settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "driver", "--config", str(self._config), *chosen]
        if self.starts:
            command.append("--resume")
        self.starts += 1
        with self.log.open("a") as log:
            log.write(f"--- start {self.starts} ---\n")
            log.flush()
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._head.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def driver_pid(self) -> int:
        """Process id of the newest driver."""
        assert self._process is not None, "submit was not called"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the driver runs."""
        assert self._process is not None, "submit was not called"
        return self._process.poll()

    def kill(self) -> None:
        """Ends the driver as `kill -9` does."""
        os.kill(self.driver_pid, signal.SIGKILL)
        self.wait(10)

    def terminate(self, grace_s: float) -> int:
        """Asks the driver to end; returns its exit code.

        Raises:
            WaitTimeout: if it takes longer than the grace; it is killed then.
        """
        os.kill(self.driver_pid, signal.SIGTERM)
        return self.wait(grace_s)

    def wait(self, timeout_s: float) -> int:
        """Waits for the driver's end; returns its exit code.

        Raises:
            WaitTimeout: and kills it.
        """
        assert self._process is not None, "submit was not called"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise WaitTimeout(
                f"the driver did not end within {timeout_s:g} s: {self.log}"
            ) from None

    def end(self) -> None:
        """Kills a driver that still runs."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def closed_step(self) -> int:
        """The last step that the run has closed; 0 before the first."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return max((line["step"] for line in lines), default=0)

    def wait_for_step(self, step: int, why: str) -> None:
        """Waits until a step is closed.

        Raises:
            DriverEnded: if the driver ends before.
            WaitTimeout: if no step is closed for QUIET_S, times the patience; every process
                writes its stacks.
        """
        closed, since = self.closed_step(), time.monotonic()
        quiet_s = QUIET_S * self.patience
        while closed < step:
            if self.exit_code is not None and self.closed_step() < step:
                self.check_running(why)
            time.sleep(POLL_S)
            if (now := self.closed_step()) != closed:
                closed, since = now, time.monotonic()
            elif time.monotonic() > since + quiet_s:
                request_stacks(self.folder, STACKS_S)
                raise WaitTimeout(
                    f"no step was closed for {quiet_s:g} s {why}, the last was {closed}: "
                    f"{self.log}, {self.folder / 'stacks'}"
                )

    def check_running(self, why: str) -> None:
        """Raises DriverEnded if no driver runs."""
        if self.exit_code is not None:
            last = self.log.read_text(errors="replace").strip().splitlines()[-5:]
            raise DriverEnded(
                f"the driver ended with code {self.exit_code} {why}: {self.log} ends with\n  "
                + "\n  ".join(last)
            )

    def learner(self) -> psutil.Process:
        """The newest learner process.

        Raises:
            LookupError: if there is none.
        """
        found = self._head.actors(LEARNER)
        if not found:
            raise LookupError("there is no learner process")
        return found[-1]

    def workers(self) -> list[psutil.Process]:
        """The processes of rollout workers, oldest first."""
        return self._head.actors(WORKER)

    def lose_host(self, process: psutil.Process) -> None:
        """Ends the host of the cluster on which a process runs; another one joins it then."""
        self._head.lose_host(process)

    def reward_processes(self) -> list[psutil.Process]:
        """The processes that score completions, of all workers."""
        return [
            child
            for worker in self.workers()
            for child in _children(worker)
            if "rollout_worker.rewards.processes.reward_child" in _command(child)
        ]


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
