"""A long run in a real browser: how soon it is there, what travels, and what an update costs.

The run is made up (benchmarks/made_run/made_run.py), of the size of a real one. A page load
starts with an empty cache; it counts from the request to the first contentful paint, and to the
moment at which the breakdown of all steps is drawn. Live updates are steps appended to the files.
"""

import contextlib
import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from benchmarks.dashboard.browser import DRAWN, LAPTOP, ROOT, chromium, serving

MOST_PAINT_S, MOST_BYTES, MOST_UPDATE_MS = 1.5, 3e6, 50.0
UPDATES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFigures:
    """What the browser measured."""

    paint_s: float
    """First contentful paint."""
    drawn_s: float
    """Until the breakdown stands there."""
    nbytes: float
    update_ms: float
    """Main thread of a live update, median."""
    longest_ms: float

    @property
    def is_within(self) -> bool:
        """Whether all bounds are kept."""
        return (
            max(self.paint_s, self.drawn_s) < MOST_PAINT_S
            and self.nbytes <= MOST_BYTES
            and self.longest_ms < MOST_UPDATE_MS
        )


def seen_of(
    loads: Sequence[tuple[float, float, float]], updates_ms: Sequence[float]
) -> PageFigures:
    """From page loads (first paint and drawn in seconds, bytes), of which the median counts, and
    from live updates.
    """
    paint_s, drawn_s, nbytes = (statistics.median(one) for one in zip(*loads, strict=True))
    return PageFigures(
        paint_s=paint_s,
        drawn_s=drawn_s,
        nbytes=nbytes,
        update_ms=statistics.median(updates_ms),
        longest_ms=max(updates_ms),
    )


def measure(*, steps: int, workers: int, loads: int) -> bool:
    """Prints the figures; whether all are within their bounds."""
    with tempfile.TemporaryDirectory(prefix="tandem-history-") as folder:
        run, log = pathlib.Path(folder) / "run", pathlib.Path(folder) / "server.log"
        with _writing(run, steps, workers) as writer, chromium() as browser:
            started = time.monotonic()
            with serving(log, "--run", str(run)) as link:
                ready_s = time.monotonic() - started
                loaded = [_load(browser, link) for _ in range(loads)]
                seen = seen_of(loaded, _updates(browser, link, writer))
    print(f"server ready in {ready_s:.2f} s; {steps} steps, {workers} workers")
    print(f"first contentful paint {seen.paint_s:.2f} s, breakdown drawn {seen.drawn_s:.2f} s")
    print(
        f"history: paint {seen.paint_s:.2f} s, drawn {seen.drawn_s:.2f} s, transferred "
        f"{seen.nbytes / 1e6:.2f} MB, update median {seen.update_ms:.1f} ms, longest "
        f"{seen.longest_ms:.1f} ms"
    )
    return seen.is_within


@contextlib.contextmanager
def _writing(run: pathlib.Path, steps: int, workers: int) -> Iterator[subprocess.Popen]:
    """Writes a run that goes on; then one more step for each line on the writer's stdin."""
    code = (
        "import sys, pathlib\n"
        "from benchmarks.made_run.made_run import MadeRun, RunPlan\n"
        "run = MadeRun(pathlib.Path(sys.argv[1]), RunPlan(steps=int(sys.argv[2]) + 1000, "
        "workers=int(sys.argv[3])))\n"
        "for _ in range(int(sys.argv[2])): run.write_step()\n"
        "run.progress()\n"
        "print('written', flush=True)\n"
        "for _ in sys.stdin: run.write_step()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run), str(steps), str(workers)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "written\n":
            raise RuntimeError("the run could not be made up")
        yield process
    finally:
        process.kill()
        process.wait()


def _load(browser, link: str) -> tuple[float, float, float]:
    """First paint and drawn in seconds, and bytes, of one page load with an empty cache."""
    context = browser.new_context(viewport=LAPTOP)
    page = context.new_page()
    network = context.new_cdp_session(page)
    network.send("Network.enable")
    nbytes: list[float] = []
    network.on("Network.loadingFinished", lambda event: nbytes.append(event["encodedDataLength"]))
    page.goto(link, wait_until="commit")
    page.locator(DRAWN).wait_for(timeout=30_000)
    drawn_ms = page.evaluate("performance.now()")
    paint_ms = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? Infinity"
    )
    page.wait_for_timeout(1000)  # requests after the first paint count too
    context.close()
    return paint_ms / 1e3, drawn_ms / 1e3, sum(nbytes)


def _updates(browser, link: str, writer: subprocess.Popen) -> list[float]:
    """Milliseconds of main thread of each live update."""
    page = browser.new_page(viewport=LAPTOP)
    page.goto(link, wait_until="commit")
    page.locator(DRAWN).wait_for(timeout=30_000)
    page.evaluate("performance.clearMeasures('tandem-update')")
    assert writer.stdin is not None
    for _ in range(UPDATES):
        writer.stdin.write("\n")
        writer.stdin.flush()
        page.wait_for_timeout(700)
    durations = page.evaluate(
        "performance.getEntriesByName('tandem-update').map(entry => entry.duration)"
    )
    page.close()
    if len(durations) < UPDATES // 2:
        raise RuntimeError(f"the page made {len(durations)} updates of {UPDATES} steps")
    return durations
