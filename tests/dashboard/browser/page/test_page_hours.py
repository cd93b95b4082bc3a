"""A page that is left open for hours holds no more than after the first minutes."""

import pytest

from benchmarks.made_run.made_run import MadeRun, RunPlan
from dashboard.runs import run_follower
from tests.chromium import Watched, open_view, wait_until, wait_until_drawn
from tests.dashboard import served as in_thread

pytestmark = [pytest.mark.browser, pytest.mark.slow]

VIEWS = ["breakdown", "timeline", "learning", "trust", "samples", "fleet", "what_if", "alerts"]
STEPS = 2000
"""Of the run; 10,000 have been tried, which took two minutes."""
AT_ONCE = 15
"""Fewer than what is told as one `reload`."""
FULL = 1000
"""Steps after which the history is as long as it gets."""
MOST_POINTS = 900


class Growth:
    """What the browser holds for a page, after it has thrown away what it can."""

    def __init__(self, page):
        self._page = page
        self._tools = page.context.new_cdp_session(page)
        self._tools.send("Performance.enable")

    def held(self) -> dict[str, float]:
        self._tools.send("HeapProfiler.collectGarbage")
        found = self._tools.send("Performance.getMetrics")["metrics"]
        metrics = {one["name"]: one["value"] for one in found}
        return {
            "nodes": metrics["Nodes"],
            "listeners": metrics["JSEventListeners"],
            "megabytes": metrics["JSHeapUsedSize"] / 1e6,
            "measures": self._page.evaluate("performance.getEntriesByType('measure').length"),
        }


def visit_all(page, run, until):
    """Shows one view after the other while steps close; ends in the first."""
    while run.step < until:
        for view in VIEWS:
            open_view(page, view)
            for _ in range(3):
                for _ in range(AT_ONCE):
                    run.write_step()
                run.progress()
                wait_until(page, f"tandem.store.run.step === {run.step}")
    open_view(page, VIEWS[0])


def test_nothing_grows_with_the_steps_that_were_watched(tmp_path, browser, monkeypatch):
    monkeypatch.setattr(run_follower, "POLL_S", 0.02)
    run = MadeRun(tmp_path / "run", RunPlan(steps=100_000, samples_per_step=2))
    run.write_step()
    run.progress()
    with in_thread.served(run.folder) as server:
        watched = Watched(browser)
        page = watched.page
        page.goto(server.link)
        wait_until_drawn(page)
        growth = Growth(page)
        visit_all(page, run, FULL)
        before = growth.held()
        visit_all(page, run, STEPS)
        after = growth.held()
        points = page.evaluate(
            """[tandem.store.columns, tandem.store.shown].flatMap((columns) =>
                [columns.steps, columns.wall, columns.path, ...Object.values(columns.metrics),
                 ...Object.values(columns.seconds)].map((column) => column.length))"""
        )
        assert max(points) <= MOST_POINTS
        for name in ("nodes", "listeners"):
            assert after[name] <= 1.1 * before[name] + 50, (name, before, after)
        assert after["megabytes"] <= 1.5 * before["megabytes"], (before, after)
        assert after["measures"] <= 600
        run.end()
        watched.context.close()
    watched.check()
