"""A long run in a real browser: how soon it is there, what travels, and what an update costs.

The run is made up (tests/services/dashboard/made_run.py), of the size of a real one. A page load
starts with an empty cache; it counts from the request to the first contentful paint, and to the
moment at which the breakdown of all steps is drawn. Live updates are steps appended to the files.
"""

import contextlib
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from deploy.dashboard_bench.running import ROOT
from services.dashboard import auth

MADE_RUN = ROOT / "tests" / "services" / "dashboard" / "made_run.py"
CHROMIUM = "/usr/bin/chromium"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
MOST_PAINT_S, MOST_BYTES, MOST_UPDATE_MS = 1.5, 3e6, 50.0
UPDATES = 20
DRAWN = "body[data-drawn=true]"
"""The page says so when the view that is shown has drawn what it has."""


def measure(*, steps: int, workers: int, loads: int) -> bool:
    """Prints the figures; whether all are within their bounds."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="tandem-history-") as folder:
        run = pathlib.Path(folder) / "run"
        with _writing(run, steps, workers) as writer, sync_playwright() as playwright:
            started = time.monotonic()
            with _serving(run) as link:
                ready_s = time.monotonic() - started
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
                seen = [_load(browser, link) for _ in range(loads)]
                updates = _updates(browser, link, writer)
                browser.close()
    paint_s, drawn_s, nbytes = (statistics.median(one) for one in zip(*seen, strict=True))
    longest = max(updates)
    print(f"server ready in {ready_s:.2f} s; {steps} steps, {workers} workers")
    print(f"first contentful paint {paint_s:.2f} s, breakdown drawn {drawn_s:.2f} s")
    print(
        f"history: paint {paint_s:.2f} s, drawn {drawn_s:.2f} s, transferred "
        f"{nbytes / 1e6:.2f} MB, update median {statistics.median(updates):.1f} ms, longest "
        f"{longest:.1f} ms"
    )
    return (
        max(paint_s, drawn_s) < MOST_PAINT_S and nbytes <= MOST_BYTES and longest < MOST_UPDATE_MS
    )


@contextlib.contextmanager
def _writing(run: pathlib.Path, steps: int, workers: int) -> Iterator[subprocess.Popen]:
    """Writes a run that goes on; then one more step for each line on the writer's stdin."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from made_run import MadeRun, Plan\n"
        "run = MadeRun(pathlib.Path(sys.argv[2]), Plan(steps=int(sys.argv[3]) + 1000, "
        "workers=int(sys.argv[4])))\n"
        "for _ in range(int(sys.argv[3])): run.write_step()\n"
        "run.progress()\n"
        "print('written', flush=True)\n"
        "for _ in sys.stdin: run.write_step()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(MADE_RUN.parent), str(run), str(steps), str(workers)],
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


@contextlib.contextmanager
def _serving(run: pathlib.Path) -> Iterator[str]:
    """The link of a server of this run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.dashboard", "--run", str(run), "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"its tokens: (.+)\)", line):
                yield auth.link(*auth.read_access(pathlib.Path(found[1])))
                return
        raise RuntimeError("the server did not say where its tokens are")
    finally:
        process.terminate()
        process.wait(10)


def _load(browser, link: str) -> tuple[float, float, float]:
    """First paint and drawn in seconds, and bytes, of one page load with an empty cache."""
    context = browser.new_context(viewport={"width": 1366, "height": 768})
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
    page.wait_for_timeout(1000)  # what is fetched behind the first picture counts too
    context.close()
    return paint_ms / 1e3, drawn_ms / 1e3, sum(nbytes)


def _updates(browser, link: str, writer: subprocess.Popen) -> list[float]:
    """Milliseconds of main thread of each live update."""
    page = browser.new_page(viewport={"width": 1366, "height": 768})
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
