"""Memory of the driver and of the dashboard while many listen, some of whom never read."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

from deploy.dashboard_bench.running import ROOT, DemoRun, demo_run

MB = 1e6
MOST_GROWTH_MB = 50.0
STEPS = 100_000
"""More than are taken while it is measured."""


@contextlib.contextmanager
def listeners(run: DemoRun, viewers: int, asleep: int = 0) -> Iterator[subprocess.Popen]:
    """Viewers in a process of their own, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.dashboard_bench.listening"]
        + [run.url, str(viewers), str(asleep)],
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


def measure(*, viewers: int, asleep: int, seconds: float) -> bool:
    """Prints the memory before, with the viewers, and after; whether it stayed within the bound."""
    with demo_run(f"run.steps={STEPS}") as run:
        run.wait_for_step(10)
        rows = [("before", *_memory(run))]
        with listeners(run, viewers, asleep) as process:
            count = wait_until_listening(process, viewers)
            rows.append((f"{viewers} viewers", *_memory(run)))
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                assert process.stdout is not None
                count = json.loads(process.stdout.readline())
                rows.append((f"{viewers} viewers, most", *_memory(run)))
        time.sleep(2)
        after = ("after", *_memory(run))
    most = max(rows[2:], key=lambda row: row[2])
    print(f"{'':>24} {'driver MB':>10} {'dashboard MB':>13}")
    for name, driver, dashboard in (*rows[:2], most, after):
        print(f"{name:>24} {driver:10.1f} {dashboard:13.1f}")
    growth = max(row[1] for row in rows) - rows[0][1]
    page_growth = most[2] - rows[0][2]
    print(
        f"viewers: {viewers} ({asleep} asleep), events {count['events']}, dropped "
        f"{count['dropped']}, driver +{growth:.1f} MB, dashboard +{page_growth:.1f} MB, "
        f"seconds {seconds:g}"
    )
    return growth < MOST_GROWTH_MB and page_growth < MOST_GROWTH_MB


def _memory(run: DemoRun) -> tuple[float, float]:
    return run.driver.memory_info().rss / MB, run.dashboard.memory_info().rss / MB
