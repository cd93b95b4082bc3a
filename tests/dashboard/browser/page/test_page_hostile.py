"""Text of the run is text on the page: nothing in it is run, loaded, or made an element."""

import json
from urllib.parse import urlsplit

import pytest

from benchmarks.made_run.made_run import make_run
from benchmarks.made_run.made_texts import HOSTILE
from tests.chromium import open_view
from tests.dashboard.browser.page_server import Served

pytestmark = pytest.mark.browser

VIEWS = ["breakdown", "timeline", "learning", "trust", "samples", "fleet", "what_if", "alerts"]
SCRIPT, IMAGE, ANSI, TURNED, SVG = HOSTILE


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Hostile text in every place that a run writes: prompts, names, errors, warnings, workers."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    make_run(folder, steps=12, hostile=True, state="failed")
    for name in ("ledger", "metrics", "timeline"):
        path = folder / f"{name}.jsonl"
        worker = json.dumps(f"rollout-1{IMAGE}")[1:-1]
        path.write_text(path.read_text().replace("rollout-1", worker))
    path = folder / "samples.jsonl"
    lines = path.read_text().split("\n")[:-1]  # a text may hold other ends of lines
    records = [json.loads(line) for line in lines]
    for i, record in enumerate(records[-8:]):
        text = HOSTILE[i % len(HOSTILE)]
        record |= {"reward_error": text, "worker": text, "finish_reason": text, "prompt": text}
        record |= {"parsed": {"strict": text, "lenient": SVG}, "rewards": {text: 0.5}}
        record["tokens"] = [[text, -0.5], ["\ud800", -1.0]]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    server = Served("--run", str(folder))
    yield server
    server.stop()


def check_inert(watched, server):
    """Nothing was run, made or fetched that the page does not itself make or fetch."""
    page = watched.page
    assert page.evaluate("window.attacked") is None
    for tag in ("script:not([src^='/static/'])", "img", "iframe", "svg[onload]", "[onerror]"):
        assert page.locator(tag).count() == 0, tag
    paths = {urlsplit(url).path for url in watched.requests}
    assert all(path == "/" or path.startswith(("/static/", "/api/")) for path in paths), paths
    assert {urlsplit(url).netloc for url in watched.requests} == {urlsplit(server.url).netloc}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_runs_what_a_run_wrote(hostile, watch, scheme):
    watched = watch(hostile, "breakdown", color_scheme=scheme)
    for view in VIEWS:
        open_view(watched.page, view)
        check_inert(watched, hostile)
    assert watched.page.inner_text("#header-run") == f"made{SCRIPT}"
    assert SCRIPT in watched.page.title()


def test_the_reason_of_the_failure_is_shown_literally(hostile, watch):
    page = watch(hostile).page
    assert f"RuntimeError: made up{IMAGE}" in page.inner_text("#banner")


def test_a_step_shows_metric_worker_and_warning_literally(hostile, watch):
    watched = watch(hostile, "breakdown?step=1")
    panel = watched.page.get_by_test_id("step-panel")
    watched.page.get_by_test_id("step-metrics").wait_for()
    text = panel.inner_text()
    assert f"reward/{SCRIPT}/mean" in text
    assert f"rollout-1{IMAGE}" in text
    assert f"step 1: {IMAGE}" in text
    check_inert(watched, hostile)


def test_every_field_of_a_completion_is_shown_literally(hostile, watch):
    watched = watch(hostile, "samples?kind=train&first=11")
    page = watched.page
    rows = page.get_by_test_id("sample-row")
    rows.first.wait_for()
    seen = ""
    for i in range(rows.count()):
        rows.nth(i).click()
        page.locator(
            f"#sample-detail:has-text('{rows.nth(i).get_attribute('data-id')}')"
        ).wait_for()
        seen += page.locator("#sample-detail").inner_text()
        check_inert(watched, hostile)
    for text in (SCRIPT, IMAGE, SVG):
        assert text in seen
    assert "U+001B" in seen, "what a terminal would act on is named"
    assert "U+202E" in seen, "what would turn the direction of text is named"


def test_long_and_broken_text_is_cut_until_it_is_asked_for(hostile, watch):
    watched = watch(hostile, "samples?kind=train&first=10&last=10")
    page = watched.page
    rows = page.get_by_test_id("sample-row")
    rows.last.click()
    page.get_by_role("heading", name="Step 10").wait_for()
    assert page.evaluate("document.querySelectorAll('*').length") < 8000
    watched.page.locator("#sample-clear").click()
    page.locator("#sample-search").fill("lone")
    page.locator("#sample-total", has_text="1–1 of 1").wait_for()
    row = page.get_by_test_id("sample-row").first
    assert "\\ud800 lone" in row.inner_text(), "half of a character is shown by its number"
    row.click()
    page.get_by_role("heading", name="Step 1 · train").wait_for()


def test_a_hostile_link_makes_nothing(hostile, watch):
    watched = watch(hostile)
    watched.allow("status of (404|422)")
    for route in (
        f"samples?q={IMAGE}",
        "samples?id=<img src=x onerror=window.attacked=1>",
        f"breakdown?step={SCRIPT}",
        "timeline?first=x&last=y",
        "<script>window.attacked=1</script>",
        "%",
    ):
        watched.page.evaluate("route => { location.hash = route }", route)
        watched.page.wait_for_timeout(300)
        check_inert(watched, hostile)
