"""Numbers that are not finite arrive as themselves, in every view, and break nothing (case O01)."""

import json

import pytest

from benchmarks.made_run.made_run import MadeRun, RunPlan, make_run
from tests.chromium import open_view, table_rows
from tests.dashboard.browser.page_server import Served

pytestmark = pytest.mark.browser

VIEWS = ["breakdown", "timeline", "learning", "trust", "samples", "fleet", "what_if", "alerts"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run whose last step is not finite in every metric, and whose last completion neither."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    make_run(folder, steps=12)
    _change_last(folder / "metrics.jsonl", _broken_metrics)
    _change_last(folder / "samples.jsonl", _broken_sample)
    server = Served("--run", str(folder))
    yield server
    server.stop()


def _change_last(path, change):
    *kept, last = path.read_text().splitlines()
    record = change(json.loads(last))
    path.write_text("\n".join([*kept, json.dumps(record)]) + "\n")


def _broken_metrics(record):
    """In the form of the run log, which writes such numbers as texts."""
    odd = ["NaN", "Infinity", "-Infinity"]
    names = [name for name in record if name not in ("step", "time")]
    return record | {name: odd[i % 3] for i, name in enumerate(names)}


def _broken_sample(record):
    tokens = [
        [text, ["NaN", "-Infinity", None][i % 3]] for i, (text, _) in enumerate(record["tokens"])
    ]
    rewards = {"gsm8k_answer": "NaN", "gsm8k_answer/strict": "Infinity"}
    return record | {"tokens": tokens, "rewards": rewards, "total_reward": "NaN"}


def test_one_nan_is_marked_at_its_step_and_the_rest_goes_on(served, watch):
    page = watch(served("nonfinite"), "learning").page
    loss = page.get_by_test_id("chart-loss")
    assert loss.locator(".chart-odd").inner_text() == "✕ NaN at step 20"
    page.locator("#learning-table-button").click()
    head = page.get_by_test_id("learning-table").locator("th").all_inner_texts()
    rows = {row[0]: row for row in table_rows(page, "[data-testid=learning-table]")}
    assert rows["20"][head.index("train/loss")] == "NaN"
    assert rows["20"][head.index("train/grad_norm")] == "NaN"
    assert rows["21"][head.index("train/loss")] not in ("NaN", "–", "")


def test_the_step_panel_names_each_of_them(served, watch):
    page = watch(served("nonfinite"), "breakdown?step=30").page
    page.get_by_test_id("step-metrics").wait_for()
    metrics = dict(table_rows(page, "[data-testid=step-metrics]"))
    assert metrics["offpolicy/is_weight_raw_max"] == "∞"
    assert metrics["reward/total/min"] == "−∞"


def test_every_view_stands_when_the_newest_value_of_everything_is_not_finite(broken, watch):
    page = watch(broken, "breakdown").page
    for view in VIEWS:
        open_view(page, view)
        assert page.locator(f"#view-{view}").inner_text().strip(), view
    open_view(page, "learning")
    for chart in ("entropy", "loss", "grad-norm"):
        value = page.get_by_test_id(f"chart-{chart}").locator(".chart-value strong").inner_text()
        assert value.split()[0] in ("NaN", "∞", "−∞"), (chart, value)
    assert page.inner_text("#header-reward") in ("NaN", "∞", "−∞")


def test_rewards_and_logprobs_that_are_not_finite_are_shown_as_such(broken, watch):
    page = watch(broken, "samples?kind=train").page
    tokens = page.get_by_test_id("tokens")
    tokens.wait_for()
    assert page.get_by_test_id("sample-row").first.locator("td").nth(3).inner_text() == "NaN"
    rewards = page.get_by_test_id("rewards").inner_text()
    assert "NaN" in rewards and "∞" in rewards
    for i, text in enumerate(("logprob NaN", "logprob −∞")):
        tokens.locator(".token").nth(i).hover()
        assert text in page.get_by_test_id("token-readout").inner_text()


def test_values_that_arrive_live_are_marked_too(tmp_path, serve, watch):
    run = MadeRun(tmp_path / "run", RunPlan(steps=9, nonfinite=True))
    for _ in range(3):
        run.write_step()
    run.progress()
    page = watch(serve("--run", run.folder), "learning").page
    for _ in range(3):
        run.write_step()
    run.progress()
    page.get_by_text("✕ NaN at step 4").first.wait_for()
    page.get_by_test_id("chart-loss").locator("canvas").wait_for()
    run.end()
