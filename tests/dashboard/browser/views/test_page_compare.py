"""Two runs on one page: where they part, and what was different from the start."""

import json

import pytest

from benchmarks.made_run.made_run import make_run
from tests.chromium import Watched, table_rows, wait_until_drawn
from tests.dashboard.browser.page_server import Served
from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

PART = 25


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two runs that draw other numbers from step PART on, with another rate and another file."""
    folders = [tmp_path_factory.mktemp("pair") / name for name in ("a", "b")]
    make_run(folders[0], steps=60, seed=4)
    make_run(
        folders[1],
        steps=60,
        seed=4,
        part_at=PART,
        flat_from=PART,
        config={"learner.optimizer.learning_rate": 1e-4, "run.name": "<b>other</b>"},
        code={
            "learner/objective/loss.py": '"""The loss."""\n\n\n'
            "def clip(x, low, high):\n    return low\n"
        },
    )
    server = Served("--compare", *map(str, folders))
    yield server, folders
    server.stop()


@pytest.fixture
def page(request, pair, watch):
    """In the light theme, if the test does not ask for another."""
    watched: Watched = watch(color_scheme=getattr(request, "param", "light"))
    pair[0].open(watched.page)
    return watched.page


def test_the_first_step_where_the_runs_part_is_said(page):
    assert f"step {PART}" in page.inner_text("#compare-part")


def test_both_runs_are_drawn_with_their_values(page, pair):
    last = [
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in pair[1]
    ]
    chart = page.get_by_test_id("chart-reward-total-mean")
    texts = chart.locator(".chart-value strong").all_inner_texts()
    assert len(texts) == 2
    for text, metrics in zip(texts, last, strict=True):
        assert says(text, metrics["reward/total/mean"])
    page.locator("#compare-table-button").click()
    head = page.get_by_test_id("compare-table").locator("th").all_inner_texts()
    newest = table_rows(page, "[data-testid=compare-table]")[0]
    for label, metrics in zip("AB", last, strict=True):
        shown = newest[head.index(f"reward/total/mean {label}")]
        assert says(shown, metrics["reward/total/mean"])


def test_configuration_and_code_that_differ_are_listed(page):
    config = {row[0]: row[1:] for row in table_rows(page, "[data-testid=compare-config]")}
    assert [float(x) for x in config["learner.optimizer.learning_rate"]] == [3e-5, 1e-4]
    assert config["run.name"] == ["made", "<b>other</b>"], "text, not markup"
    page.get_by_role("radio", name="Code").click()
    code = page.get_by_test_id("compare-code")
    assert "learner/objective/loss.py" in code.inner_text()
    assert code.locator(".added").first.inner_text().strip() == "+    return low"
    assert code.locator(".removed").first.inner_text().strip() == "-    return x"


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_the_page_fits_and_finds_a_metric(page):
    size = page.evaluate(
        "[document.scrollingElement.scrollWidth, document.scrollingElement.scrollHeight]"
    )
    assert size == [1366, 768]
    page.get_by_label("find a metric").fill("grad_norm")
    page.get_by_test_id("chart-train-grad_norm").wait_for()
    assert page.locator("[data-testid^=chart-]").count() == 1
    for text in ("loss", "reward", "time", ""):
        page.get_by_label("find a metric").fill(text)
    charts = page.locator("[data-testid^=chart-]").count()
    assert page.evaluate("uPlot.sync('compare').plots.length") == charts, "those before are gone"


def test_two_equal_runs_do_not_part(tmp_path, serve, watch):
    for name in ("a", "b"):
        make_run(tmp_path / name, steps=20, seed=4)
    watched = watch()
    serve("--compare", tmp_path / "a", tmp_path / "b").open(watched.page)
    wait_until_drawn(watched.page)
    said = watched.page.inner_text("#compare-part")
    assert "diverges beyond noise" in said and "20 common steps" in said
    assert "same configuration" in watched.page.inner_text("[data-testid=compare-config]")
