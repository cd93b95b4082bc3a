"""A real run of the demo to measure, and the dashboard that belongs to it."""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.dashboard.browser import ROOT

STEPS = 100_000
"""More than are taken while it is measured."""
START_S = 180.0
"""For the first step to be closed."""


class RunEnded(RuntimeError):
    """The run ended, or did not begin, while it was measured."""


class DemoRun:
    """One run of the demo's configuration, in a process of its own."""

    def __init__(self, folder: pathlib.Path, settings: list[str]):
        self.folder = folder
        self._log = (folder.parent / "run.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "driver", "--config", "deploy/runs/demo_cpu.yaml"]
            + [part for one in settings for part in ("--set", one)]
            + ["--set", f"run.output_dir={folder}"],
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def driver(self) -> psutil.Process:
        """The driver's process."""
        return psutil.Process(self._process.pid)

    @property
    def dashboard(self) -> psutil.Process:
        """The process that serves the page.

        Raises:
            RunEnded: if there is none.
        """
        for child in self.driver.children():
            if "dashboard" in child.cmdline():
                return child
        raise RunEnded(f"the driver has no dashboard process; its output: {self.tail()}")

    @property
    def url(self) -> str:
        """Address of the page, without a token."""
        return (self.folder / "dashboard" / "url").read_text().strip()

    @property
    def token(self) -> str:
        """The page's view token."""
        return (self.folder / "dashboard" / "view_token").read_text().strip()

    @property
    def step(self) -> int:
        """The last one that was closed: from a small file, since looking must cost nothing."""
        try:
            return json.loads((self.folder / "status.json").read_text())["step"]
        except FileNotFoundError:
            return 0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def wait_for_step(self, step: int, timeout_s: float = START_S) -> None:
        """Returns when a step is closed.

        Raises:
            RunEnded: naming the step, if the run ends before or takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while self.step < step:
            if self._process.poll() is not None:
                raise RunEnded(f"the run ended before step {step}; its output: {self.tail()}")
            if time.monotonic() > deadline:
                raise RunEnded(f"step {step} was not closed within {timeout_s:g} s: {self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        """The end of what the run has printed."""
        return (self.folder.parent / "run.log").read_text()[-2000:]

    def end(self) -> None:
        """Stops the run."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def demo_run(*settings: str) -> Iterator[DemoRun]:
    """The demo without evaluation, checkpoints in passing and export, until the block ends: it does
    not end by itself.
    """
    quiet = ["eval.at_start=false", "eval.at_end=false", "checkpoint.every_steps=0"]
    quiet += ["checkpoint.export_hf=false", "log.dashboard.port=0", f"run.steps={STEPS}"]
    with tempfile.TemporaryDirectory(prefix="tandem-dashboard-") as folder:
        run = DemoRun(pathlib.Path(folder) / "run", [*quiet, *settings])
        try:
            run.wait_for_step(1)
            yield run
        finally:
            run.end()
