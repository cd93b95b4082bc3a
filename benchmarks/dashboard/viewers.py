"""Memory of driver and dashboard with many viewers, some of which never read."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.dashboard.browser import ROOT
from benchmarks.dashboard.demo_run import DemoRun, demo_run

MB = 1e6
MOST_GROWTH_MB = 50.0


@contextlib.contextmanager
def listeners(run: DemoRun, viewers: int, asleep: int = 0) -> Iterator[subprocess.Popen]:
    """Viewers in a process of their own, until the block ends."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.dashboard.viewer_process"),
            *(run.url, str(viewers), str(asleep)),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(run.token + "\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until_listening(process: subprocess.Popen, viewers: int, timeout_s: float = 120.0) -> dict:
    """Returns the first count in which all viewers listen.

    Raises:
        TimeoutError: saying how many do.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    while True:
        count = json.loads(process.stdout.readline())
        if count["listening"] >= viewers:
            return count
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} of {viewers} viewers listen after {timeout_s:g} s")


class Memory(NamedTuple):
    """Of both processes at one moment, in MB."""

    driver: float
    dashboard: float


def growth(before: Memory, during: Sequence[Memory]) -> Memory:
    """By how much each process was larger at its largest than before."""
    return Memory(
        max(one.driver for one in during) - before.driver,
        max(one.dashboard for one in during) - before.dashboard,
    )


def measure(*, viewers: int, asleep: int, seconds: float) -> bool:
    """Prints the memory before, with the viewers, and after; whether it stayed within the bound."""
    with demo_run() as run:
        run.wait_for_step(10)
        before = _memory(run)
        with listeners(run, viewers, asleep) as process:
            count = wait_until_listening(process, viewers)
            during = [_memory(run)]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                assert process.stdout is not None
                count = json.loads(process.stdout.readline())
                during.append(_memory(run))
        time.sleep(2)
        after = _memory(run)
    grown = growth(before, during)
    most = Memory(before.driver + grown.driver, before.dashboard + grown.dashboard)
    rows = {"before": before, f"{viewers} viewers": during[0], "most": most, "after": after}
    print(f"{'':>24} {'driver MB':>10} {'dashboard MB':>13}")
    for name, memory in rows.items():
        print(f"{name:>24} {memory.driver:10.1f} {memory.dashboard:13.1f}")
    print(
        f"viewers: {viewers} ({asleep} asleep), events {count['events']}, dropped "
        f"{count['dropped']}, driver +{grown.driver:.1f} MB, dashboard +{grown.dashboard:.1f} MB, "
        f"seconds {seconds:g}"
    )
    return max(grown) < MOST_GROWTH_MB


def _memory(run: DemoRun) -> Memory:
    return Memory(run.driver.memory_info().rss / MB, run.dashboard.memory_info().rss / MB)
