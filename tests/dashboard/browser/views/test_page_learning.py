"""The learning view shows what metrics.jsonl holds: newest values, tables, the funnel."""

import json

import pytest

from benchmarks.made_run.made_run import make_run
from tests.chromium import open_view, table_rows
from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

NEWEST = {
    "reward-total": ["reward/total/mean"],
    "reward-functions": ["reward/gsm8k_answer/mean"],
    "accuracy": ["eval/accuracy/strict", "eval/accuracy/lenient"],
    "completion-length": [
        "rollout/completion_len_mean",
        "rollout/completion_len_p90",
        "rollout/completion_len_max",
    ],
    "entropy": ["train/entropy"],
    "clip-fractions": ["train/clip_fraction_low", "train/clip_fraction_high"],
    "grad-norm": ["train/grad_norm"],
    "learning-rate": ["train/learning_rate"],
    "loss": ["train/loss"],
}
ACCURACY = "eval/accuracy/strict"
STAGES = ("generated", "scored", "nonzero_advantage", "unclipped", "contributed")


def values_of(page, chart):
    return page.get_by_test_id(f"chart-{chart}").locator(".chart-value strong").all_inner_texts()


def test_every_chart_names_the_newest_value(served, watch, lines):
    page = watch(served("finished"), "learning").page
    last = lines("finished", "metrics")[-1]
    for chart, names in NEWEST.items():
        texts = values_of(page, chart)
        assert len(texts) == len(names), chart
        for name, text in zip(names, texts, strict=True):
            assert says(text, last[name]), (name, text, last[name])
        assert page.get_by_test_id(f"chart-{chart}").locator("canvas").count() == 1


def test_the_cursor_reads_one_step_in_all_charts(served, watch, lines):
    page = watch(served("finished"), "learning").page
    over = page.get_by_test_id("chart-loss").locator(".u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] / 2, over["y"] + over["height"] / 2)
    metrics = lines("finished", "metrics")[20]
    for chart in ("loss", "entropy", "grad-norm"):
        assert says(values_of(page, chart)[0], metrics[NEWEST[chart][0]]), chart


def test_the_table_holds_every_step(served, watch, lines):
    page = watch(served("finished"), "learning").page
    page.locator("#learning-table-button").click()
    head = page.get_by_test_id("learning-table").locator("th").all_inner_texts()
    metrics = {str(line["step"]): line for line in lines("finished", "metrics")}
    rows = table_rows(page, "[data-testid=learning-table]")
    assert [row[0] for row in rows] == [str(step) for step in range(40, -1, -1)]
    assert {name for names in NEWEST.values() for name in names} <= set(head)
    for row in rows:
        for name, text in zip(head[1:], row[1:], strict=True):
            assert says(text, metrics[row[0]].get(name)), (row[0], name, text)


def test_the_funnel_counts_the_tokens_of_the_newest_step(served, watch, lines):
    page = watch(served("finished"), "learning").page
    last = lines("finished", "metrics")[-1]
    funnel = page.get_by_test_id("funnel")
    assert funnel.get_by_role("heading").inner_text() == "Token funnel of step 40"
    for stage in STAGES:
        cells = funnel.locator(f"[data-stage={stage}] [role=cell]").all_inner_texts()
        tokens = last[f"funnel/{stage}"]
        assert says(cells[0], tokens), stage
        assert says(cells[1], tokens / last["funnel/generated"]), stage


def test_a_range_that_is_chosen_holds_for_other_views_too(served, watch):
    page = watch(served("grown"), "learning").page
    page.get_by_role("radio", name="Last 50").click()
    open_view(page, "breakdown")
    assert page.get_by_role("radio", name="Last 50").first.get_attribute("aria-checked") == "true"


def test_what_is_not_measured_says_why(served, watch):
    page = watch(served("finished"), "learning").page
    assert "algorithm.kl_coef is 0" in page.get_by_test_id("chart-kl").inner_text()


def metrics_of_sets(line: dict, sets: dict[str, float]) -> dict:
    """A line of metrics as one of a run with several held-out sets has it.

    Args:
        sets: how far the accuracy of each lies below that of the made-up evaluation.
    """
    found = {name: x for name, x in line.items() if name.startswith("eval/")}
    for name, below in sets.items():
        for key, value in found.items():
            shift = below if key.startswith("eval/accuracy") else 0.0
            line[f"eval/{name}/{key.removeprefix('eval/')}"] = value - shift
    return line


def test_each_held_out_set_has_a_row_and_a_curve_with_its_paired_test(tmp_path, serve, watch):
    make_run(tmp_path / "run", steps=12, seed=4)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [metrics_of_sets(line, {"sums": 0.0, "words": 0.1}) for line in lines]
    paired = {"p_value": 0.0123, "better": 31, "worse": 12}
    lines[-1] |= {f"eval/words/paired/{key}": value for key, value in paired.items()}
    lines[-1] |= {"eval/words/pass_at_8": 0.75, "eval/words/step": 10}
    lines[-1]["rollout/prompts_skipped"] = 7
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = watch(serve("--run", tmp_path / "run"), "learning").page
    rows = table_rows(page, "[data-testid=evaluation]")
    assert [row[0] for row in rows] == ["sums", "words"]
    for row in rows:
        last = lines[-1][f"eval/{row[0]}/accuracy/strict"]
        assert float(row[1].removesuffix("%").strip()) == pytest.approx(100 * last, abs=0.06)
        assert row[5] == "200"
    assert (rows[0][3], rows[0][6], rows[0][7]) == ("–", "12", "–")
    assert rows[1][3].replace("\u202f", " ") == "@8 75.0 %" and rows[1][6] == "10"
    assert rows[1][7] == "31 better, 12 worse, p = 0.0123"
    assert len(values_of(page, "accuracy")) == 2
    assert values_of(page, "prompts-skipped") == ["7"]


def test_a_single_set_has_one_row_and_no_chart_of_skipped_prompts(served, watch, lines):
    page = watch(served("finished"), "learning").page
    [row] = table_rows(page, "[data-testid=evaluation]")
    assert row[0] == "held-out" and says(row[1], lines("finished", "metrics")[-1][ACCURACY])
    assert not page.get_by_test_id("chart-prompts-skipped").is_visible()
