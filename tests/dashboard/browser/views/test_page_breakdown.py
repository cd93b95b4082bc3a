"""The breakdown shows the ledger's seconds: hovered, opened, as a table, and in the legend."""

import pytest

from diagnosis.judgement.breakdown import OTHER, critical_path
from diagnosis.records.facts import StepFacts
from services.process.phases import UNEXPLAINED
from tests.chromium import table_rows, wait_until
from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

CHART = "[data-testid=breakdown-chart]"
TITLES = "Object.fromEntries(tandem.store.run.phases.map(p => [tandem.store.phaseTitle(p), p]))"


def path_of(record):
    """The critical path of a record of ledger.jsonl."""
    known = {key: record[key] for key in ("step", "wall_s", "processes")}
    return critical_path(StepFacts(**known, time=0.0, metrics={}))


def tooltip(page):
    """Phase title -> seconds and share, as the tooltip has them."""
    rows = table_rows(page, ".tooltip .tip-table")
    return {title: (seconds, share) for _, title, seconds, share in rows}


def hover(page, step, steps, row=0):
    """Puts the pointer on the bar of a step, in the row of a process."""
    label = page.locator(".row-label").nth(row).bounding_box()
    box = page.locator(f"{CHART} canvas").first.bounding_box()
    left = 46  # the labels of the seconds
    x = box["x"] + left + (box["width"] - left) * (step + 0.5) / steps
    page.mouse.move(x, label["y"] + label["height"] / 2)
    page.locator(".tooltip").wait_for(state="visible")


@pytest.mark.parametrize("row, process", [(0, None), (1, "learner"), (2, "rollout-0")])
def test_hovering_gives_the_seconds_and_share_of_the_ledger(served, watch, lines, row, process):
    page = watch(served("finished"), "breakdown").page
    titles = page.evaluate(TITLES)
    record = lines("finished", "ledger")[17]
    expected = record["processes"][process] if process else path_of(record)
    hover(page, 17, 41, row)
    said = tooltip(page)
    assert page.locator(".tooltip .tip-head strong").inner_text() == "step 17"
    shown = {titles[title]: texts for title, texts in said.items()}
    if process is None:  # what the path does not explain has the same name on the page
        shown[OTHER] = shown.pop(UNEXPLAINED)
    assert set(shown) == {phase for phase, s in expected.items() if s > 5e-6}
    for phase, (seconds, share) in shown.items():
        assert says(seconds, expected[phase]), phase
        assert says(share, expected[phase] / record["wall_s"]), phase


def test_a_click_opens_the_step_with_every_number_of_both_files(served, watch, lines):
    page = watch(served("finished"), "breakdown").page
    titles = page.evaluate(TITLES)
    hover(page, 20, 41)
    page.mouse.down()
    page.mouse.up()
    panel = page.get_by_test_id("step-panel")
    panel.get_by_role("heading", name="Step 20").wait_for()
    page.get_by_test_id("step-metrics").wait_for()
    ledger, metrics = lines("finished", "ledger")[20], lines("finished", "metrics")[20]
    names = list(ledger["processes"])
    rows = table_rows(page, "[data-testid=step-phases]")
    for title, _, *cells in rows:
        for name, text in zip(names, cells, strict=True):
            assert says(text or "0 s", ledger["processes"][name][titles[title]]), (title, name)
    shown = dict(table_rows(page, "[data-testid=step-metrics]"))
    assert set(shown) == set(metrics) - {"step", "time"}
    for name, text in shown.items():
        assert says(text, metrics[name]), (name, text, metrics[name])
    fates = table_rows(page, "[data-testid=step-groups]")
    [trained] = [row for row in fates if row[0] == "trained"]
    assert trained[1] == "16"
    assert all(group in trained[2] for group in ledger["groups"]["trained"])


def test_the_table_holds_every_step_and_process(served, watch, lines):
    page = watch(served("finished"), "breakdown").page
    page.locator("#breakdown-table-button").click()
    titles = page.evaluate(TITLES)
    for process in ("learner", "rollout-1"):
        page.get_by_role("radio", name=process).click()
        head = page.get_by_test_id("breakdown-table").locator("th").all_inner_texts()
        rows = table_rows(page, "[data-testid=breakdown-table]")
        assert [int(row[0]) for row in rows] == list(range(40, -1, -1)), "the newest first"
        for row in rows:
            record = lines("finished", "ledger")[int(row[0])]
            assert says(row[1], record["wall_s"])
            for title, text in zip(head[2:], row[2:], strict=True):
                seconds = record["processes"][process][titles[title]]
                assert says(text or "0 s", seconds if seconds > 5e-6 else 0.0), (row[0], title)


def test_shares_and_the_last_steps_change_what_is_drawn(served, watch):
    page = watch(served("grown"), "breakdown").page
    page.get_by_role("radio", name="Last 50").click()
    wait_until(page, "tandem.store.shown.steps[0] === 11")
    page.get_by_role("radio", name="Shares").click()
    hover(page, 0, 50)
    assert page.locator(".tooltip strong").inner_text() == "step 11"
    page.get_by_role("radio", name="All steps").click()
    wait_until(page, "tandem.store.shown.steps[0] === 0")


def test_a_drag_zooms_and_the_chip_leads_back(served, watch):
    page = watch(served("finished"), "breakdown").page
    hover(page, 10, 41)
    page.mouse.down()
    hover_to = page.locator(f"{CHART} canvas").first.bounding_box()
    page.mouse.move(hover_to["x"] + hover_to["width"] * 0.7, hover_to["y"] + 60, steps=5)
    page.mouse.up()
    wait_until(page, "tandem.store.range.mode === 'fixed'")
    first, last = page.evaluate("[tandem.store.shown.steps[0], tandem.store.shown.last]")
    assert 9 <= first <= 11 and 25 <= last <= 31
    page.get_by_role("button", name=f"steps {first}–{last}").click()
    wait_until(page, "tandem.store.range.mode === 'all'")


def test_the_legend_has_the_means_and_points_at_what_is_unexplained(served, watch, lines):
    page = watch(served("finished"), "breakdown").page
    titles = page.evaluate(TITLES)
    paths = [path_of(record) for record in lines("finished", "ledger")]
    assert page.inner_text(".legend-card h2") == "Mean of steps 0–40: critical path"
    first, note, *rest = table_rows(page, ".legend")
    for _, title, text, _ in [first, *rest]:
        phase = OTHER if titles[title] == UNEXPLAINED else titles[title]
        mean = sum(path.get(phase, 0.0) for path in paths) / len(paths)
        assert says(text, mean), title
    assert first[1] == "unexplained", "what no phase explains is on top of the stack"
    assert note[1] == "more than 5.0 % in 1 of 41 steps"
    assert page.locator(".legend tr .hatched").count() == 1


def test_the_panel_walks_and_leads_to_the_step_elsewhere(served, watch):
    page = watch(served("finished"), "breakdown?step=20").page
    panel = page.get_by_test_id("step-panel")
    panel.get_by_role("button", name="the step after").click()
    panel.get_by_role("heading", name="Step 21").wait_for()
    panel.get_by_role("textbox", name="find a metric").or_(
        panel.get_by_role("searchbox", name="find a metric")
    ).fill("entropy")
    assert [row[0] for row in table_rows(page, "[data-testid=step-metrics]")] == ["train/entropy"]
    panel.get_by_role("button", name="Samples").click()
    page.locator("#view-samples").wait_for(state="visible")
    assert "first=21" in page.url and "last=21" in page.url


def test_the_header_says_how_far_and_how_good(served, watch, lines):
    page = watch(served("finished"), "breakdown").page
    last = lines("finished", "metrics")[-1]
    assert page.inner_text("#header-step") == "40 / 40"
    assert page.inner_text("#header-state").split() == ["●", "finished"]
    assert says(page.inner_text("#header-reward"), last["reward/total/mean"])
    label = page.locator(".fact", has=page.locator("#header-accuracy")).locator(".fact-label")
    assert label.inner_text() == "accuracy, step 40"
    accuracy, half = page.inner_text("#header-accuracy").split(" ± ")
    assert says(accuracy, last["eval/accuracy/strict"])
    low, high = (last[f"eval/accuracy/strict_{side}"] for side in ("low", "high"))
    assert says(half, (high - low) / 2)
    steps = [record["wall_s"] for record in lines("finished", "ledger")[-10:]]
    assert says(page.inner_text("#header-step-time"), sum(steps) / len(steps))
