"""What the page asks its server for: each thing once, and for a step only what is new."""

from urllib.parse import urlsplit

import pytest

from benchmarks.made_run.made_run import MadeRun, RunPlan
from tests.chromium import open_view, wait_until
from tests.dashboard.browser.page_server import Handed

pytestmark = pytest.mark.browser

START = {"run", "history", "catalog", "stream", "step/6"}
VIEWS = {
    "breakdown": [],
    "timeline": ["timeline"],
    "learning": [],
    "samples": ["samples", "samples/t23"],
    "what_if": [],
    "alerts": [],
}
"""View -> what it asks for when it is opened first."""


@pytest.fixture
def run(tmp_path):
    made = MadeRun(tmp_path / "run", RunPlan(steps=30))
    for _ in range(7):
        made.write_step()
    made.progress()
    return made


@pytest.fixture
def watched(run, watch):
    server = Handed(run.folder)
    server.start()
    page = watch(server, "breakdown")
    yield page
    page.allow("net::ERR_")  # of the stream, as the server ends
    server.close()


def asked(watched):
    """Names below /api/ since the last call, once a moment has passed."""
    watched.page.wait_for_timeout(400)
    paths = [urlsplit(url).path for url in watched.requests]
    watched.requests.clear()
    return [path.removeprefix("/api/") for path in paths if path.startswith("/api/")]


def test_a_load_and_each_view_ask_once_and_a_step_that_closes_for_nothing(run, watched):
    page = watched.page
    wait_until(page, "tandem.store.judgement !== null && tandem.store.lastStep !== null")
    first = asked(watched)
    assert set(first) == START and len(first) == len(START)
    for view, wanted in VIEWS.items():
        open_view(page, view)
        assert asked(watched) == wanted, view
    for view in ("breakdown", "learning", "what_if", "alerts"):
        open_view(page, view)
        run.write_step()
        run.progress()
        wait_until(page, f"tandem.store.lastStep.step === {run.step}")
        assert asked(watched) == [], view
    open_view(page, "timeline")
    asked(watched)
    run.write_step()
    run.progress()
    wait_until(page, f"tandem.store.timelineStep === {run.step}")
    assert asked(watched) == ["timeline"]
