"""Makes the screenshots of the dashboard's views in docs/dashboard/, light and dark.

    python -m deploy.dashboard_shots                 of a made-up run
    python -m deploy.dashboard_shots --run DIR       of a real one

The made-up run of the tests stands in for a real one: 60 steps, and workers that go from 1 to 3.
Screenshots are JPEG files below MOST_BYTES.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.dashboard.browser import DRAWN, LAPTOP, MADE_RUN, ROOT, START_S, chromium, serving

OUT = ROOT / "docs" / "dashboard"
MOST_BYTES = 120_000
QUALITIES = (80, 70, 60, 50, 40)
VIEWS = {
    "breakdown": "breakdown",
    "step": "breakdown?step=40",
    "timeline": "timeline?first=38&last=41",
    "learning": "learning",
    "trust": "trust",
    "samples": "samples?kind=train&id=t160",
    "fleet": "fleet",
    "what-if": "what_if",
    "alerts": "alerts",
}
"""Name of the screenshot -> part of the address after #."""
CODE = "def clip(x, low, high):\n    return max(low, min(x, high))\n"
MAKE_DIVERGED = f"""
import pathlib, sys
from benchmarks.made_run.made_run import make_run
make_run(pathlib.Path(sys.argv[1]), steps=60, part_at=25, flat_from=25,
         config={{"learner.optimizer.learning_rate": 3e-4}},
         code={{"learner/objective/loss.py": {CODE!r}}})
"""
"""Writes a run that is the same as the made-up one of the same seed up to step 24."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes every screenshot and prints its size."""
    given = _arguments(arguments)
    for scheme in ("light", "dark"):
        (OUT / scheme).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tandem-shots-") as folder:
        place = pathlib.Path(folder)
        run = given.run or _made(place / "run", "--workers", "1", "--workers-to", "3")
        pair = [_made(place / "a"), _made_diverged(place / "b")]
        with chromium() as browser:
            with serving(place / "log", "--run", str(run)) as link:
                _shoot(browser, link, VIEWS)
            with serving(place / "log2", "--compare", *map(str, pair)) as link:
                _shoot(browser, link, {"compare": ""})


def _made(folder: pathlib.Path, *arguments: str) -> pathlib.Path:
    command = [sys.executable, "-m", MADE_RUN, str(folder), "--steps", "60", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def _made_diverged(folder: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-c", MAKE_DIVERGED, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def _shoot(browser, link: str, views: dict[str, str]) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=LAPTOP, color_scheme=scheme)
        page = context.new_page()
        for name, route in views.items():
            page.goto("about:blank")
            page.goto(f"{link}#{route}")
            page.locator(DRAWN).wait_for(timeout=START_S * 1e3)
            page.wait_for_timeout(600)  # for charts that are drawn in the next frames
            _write(page, OUT / scheme / f"{name}.jpg")
        context.close()


def _write(page, path: pathlib.Path) -> None:
    """Writes a screenshot in the best quality that is small enough."""
    image = b""
    for quality in QUALITIES:
        image = page.screenshot(type="jpeg", quality=quality)
        if len(image) <= MOST_BYTES:
            break
    path.write_bytes(image)
    print(f"{path.relative_to(ROOT)}: {len(image) / 1e3:.0f} kB", flush=True)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--run", type=pathlib.Path, help="folder of a run; default: a made-up one")
    given = parser.parse_args(arguments)
    if given.run is not None and not (given.run / "status.json").is_file():
        parser.error(f"--run {given.run} holds no status.json: give the output folder of a run")
    return given


if __name__ == "__main__":
    main()
