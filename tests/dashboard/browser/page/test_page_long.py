"""4,000 steps of 8 workers: what travels, what stands in the page and what is drawn is bounded.

How long it takes is measured by `python -m deploy.dashboard_bench history`, on a machine at rest.
"""

import pytest

from tests.chromium import Watched, open_view, wait_until
from tests.dashboard.browser.reading import says

pytestmark = [pytest.mark.browser, pytest.mark.slow]

VIEWS = ["breakdown", "timeline", "learning", "trust", "samples", "fleet", "what_if", "alerts"]
MOST_BYTES = 3e6
MOST_NODES = 6000
MOST_POINTS = 900
"""Bins of the history: 600, and half as many more that live steps may add."""


@pytest.fixture
def long_page(browser, served):
    watched = Watched(browser)
    network = watched.context.new_cdp_session(watched.page)
    network.send("Network.enable")
    watched.received = []
    network.on("Network.dataReceived", lambda e: watched.received.append(e["encodedDataLength"]))
    served("long").open(watched.page, "breakdown")
    yield watched
    watched.context.close()
    watched.check()


def test_the_first_view_takes_few_bytes_and_points(long_page, lines):
    page = long_page.page
    assert sum(long_page.received) <= MOST_BYTES
    bins, steps = page.evaluate("[tandem.store.columns.steps.length, tandem.store.columns.bin]")
    assert 300 <= bins <= 600 and bins * steps >= 4_001
    assert page.evaluate("document.querySelectorAll('*').length") <= MOST_NODES
    note = page.locator("#view-breakdown").get_by_test_id("bin-note")
    assert note.inner_text() == f"mean of {steps} steps each"
    assert page.inner_text("#header-step") == "4,000 / 4,000"


def test_the_newest_numbers_are_those_of_a_step_and_not_of_a_bin(long_page, lines):
    page = long_page.page
    last = lines("long", "metrics")[-1]
    wait_until(page, "tandem.store.lastStep !== null")
    open_view(page, "learning")
    assert says(page.inner_text("#header-reward"), last["reward/total/mean"])
    funnel = page.get_by_test_id("funnel")
    assert funnel.get_by_role("heading").inner_text() == "Token funnel of step 4000"
    shown = funnel.locator("[data-stage=generated] [role=cell]").first.inner_text()
    assert says(shown, last["funnel/generated"])


def test_all_views_together_stay_bounded(long_page):
    page = long_page.page
    for view in VIEWS:
        open_view(page, view)
        assert page.evaluate("document.querySelectorAll('*').length") <= MOST_NODES, view
    points = page.evaluate(
        "Math.max(...Object.values(tandem.store.columns.metrics).map(column => column.length))"
    )
    assert points <= MOST_POINTS
    paths = page.evaluate(
        "[...document.querySelectorAll('path')].map(p => p.getAttribute('d').length)"
    )
    assert sum(paths) < 400_000, "characters of drawn lines"
    assert sum(long_page.received) <= 2 * MOST_BYTES


def test_a_closer_look_brings_single_steps_back(long_page, lines):
    page = long_page.page
    page.evaluate("tandem.store.setRange({ mode: 'fixed', first: 2000, last: 2040 })")
    wait_until(page, "tandem.store.shown.bin === 1")
    page.locator("#breakdown-table-button").click()
    row = page.get_by_test_id("breakdown-table").locator("tbody tr").first
    assert row.locator("td").first.inner_text() == "2040"
    assert says(row.locator("td").nth(1).inner_text(), lines("long", "ledger")[2040]["wall_s"])
