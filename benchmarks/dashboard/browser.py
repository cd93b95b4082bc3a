"""A dashboard server and a headless browser, for screenshots and measurements."""

import contextlib
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from dashboard import auth

ROOT = pathlib.Path(__file__).resolve().parents[2]
MADE_RUN = "benchmarks.made_run.made_run"
"""The module that writes a made-up run, which stands in for a real one."""
LAPTOP = {"width": 1366, "height": 768}
DRAWN = "body[data-drawn=true]"
"""The page sets this when the current view has drawn all its data."""
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
START_S = 40.0


@contextlib.contextmanager
def chromium() -> Iterator:
    """A headless browser, until the block ends."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        if path is None:
            sys.exit("chromium is not installed: make chromium (as root)")
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()


@contextlib.contextmanager
def serving(log: pathlib.Path, *arguments: str) -> Iterator[str]:
    """The link of `python -m dashboard ARGUMENTS`, which ends with the block.

    Args:
        log: gets what it says.

    Raises:
        RuntimeError: with that, if it does not say where it is within START_S.
    """
    command = [sys.executable, "-m", "dashboard", *arguments, "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not (said := re.search(r"its tokens: (.*)\)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server said no address: {log.read_text()}")
            time.sleep(0.05)
        yield auth.link(*auth.read_access(pathlib.Path(said[1])))
    finally:
        process.terminate()
        process.wait(10)
