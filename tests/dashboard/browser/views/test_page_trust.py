"""The trust view: each check with its value of the file, its bound and a light with a word."""

import statistics

import pytest

from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

VALUES = {
    "logprob_gap": ("offpolicy/logprob_gap_mean", statistics.median),
    "weights_raw": ("offpolicy/is_weight_raw_mean", statistics.median),
    "staleness": ("offpolicy/staleness_max", max),
    "zero_variance": ("rollout/zero_variance_fraction", statistics.median),
    "reward_errors": ("reward_error/fraction", statistics.mean),
    "disagreement": ("reward/gsm8k_answer/disagreement", statistics.median),
    "canary": ("canary/gap_max", max),
}
WORDS = {"ok": "fine", "warn": "look", "bad": "bad", "none": "no data"}


def rows_of(page):
    """Check -> light, its word, value and bound."""
    rows = page.get_by_test_id("trust-row").evaluate_all(
        """rows => rows.map(row => [row.dataset.id, row.dataset.light,
            row.querySelector(".light-word").textContent, row.cells[2].textContent,
            row.cells[3].textContent])"""
    )
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("kind", ["finished", "stale"])
def test_values_are_those_of_the_last_ten_steps(served, watch, lines, kind):
    page = watch(served(kind), "trust").page
    page.get_by_test_id("trust-row").first.wait_for()
    shown = rows_of(page)
    last = lines(kind, "metrics")[-10:]
    for check, (name, measure) in VALUES.items():
        light, word, value, _ = shown[check]
        expected = measure([line[name] for line in last])
        assert says(value, expected), (check, value, expected)
        assert WORDS[light] == word


def test_a_light_has_shape_and_word_and_their_count_is_shown(served, watch):
    page = watch(served("finished"), "trust").page
    page.get_by_test_id("trust-row").first.wait_for()
    shapes = page.get_by_test_id("trust-row").evaluate_all(
        """rows => rows.map(row =>
            [row.dataset.light, row.querySelector(".light-shape").textContent])"""
    )
    of_light = dict(shapes)
    assert len(set(of_light.values())) == len(of_light), "no two lights share a shape"
    summary = page.get_by_test_id("trust-summary").inner_text()
    for light, word in WORDS.items():
        n = sum(one == light for one, _ in shapes)
        assert (f"{n} {word}" in summary) == (n > 0)


def test_a_check_that_fails_is_chosen_first_and_its_history_is_shown(served, watch):
    page = watch(served("nonfinite"), "trust").page
    row = page.locator("[data-testid=trust-row][aria-selected=true]")
    row.wait_for()
    assert row.get_attribute("data-light") in ("bad", "warn")
    title = row.locator(".check-title").inner_text()
    assert page.locator("#trust-detail-title").inner_text() == title
    row.focus()
    page.keyboard.press("ArrowDown")
    other = page.locator("[data-testid=trust-row][aria-selected=true] .check-title").inner_text()
    assert other != title and page.locator("#trust-detail-title").inner_text() == other


def test_the_histogram_counts_groups_by_staleness(served, watch, lines):
    page = watch(served("stale"), "trust").page
    page.get_by_test_id("staleness-bar").first.wait_for()
    bars = dict(
        page.get_by_test_id("staleness-bar").evaluate_all(
            "bars => bars.map(bar => [bar.dataset.n, Number(bar.dataset.groups)])"
        )
    )
    for n in ("0", "1"):
        name = f"offpolicy/staleness_{n}"
        assert bars[n] == sum(line.get(name, 0.0) for line in lines("stale", "metrics"))


def test_a_disagreement_leads_to_its_completions(served, watch):
    page = watch(served("finished"), "trust").page
    page.get_by_test_id("samples-of-disagreement").click()
    page.locator("#view-samples").wait_for(state="visible")
    assert page.locator("#sample-disagree").is_checked()
