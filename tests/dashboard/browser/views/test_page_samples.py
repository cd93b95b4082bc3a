"""The samples view finds, pages and shows what samples.jsonl and eval.jsonl hold."""

import math

import pytest

from tests.chromium import table_rows, wait_until
from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

ROW = "[data-testid=sample-row]"


def records_of(lines, kind="finished"):
    """Id -> record of both files, the newest first as the page lists them."""
    found = [(r["step"], "train", i, r) for i, r in enumerate(lines(kind, "samples"))]
    found += [(r["step"], "eval", i, r) for i, r in enumerate(lines(kind, "eval"))]
    found.sort(key=lambda one: (one[0], one[1] == "eval", one[2]), reverse=True)
    return {f"{which[0]}{i}": record for _, which, i, record in found}


def shown(page):
    """Id -> cells of the rows that are listed."""
    rows = page.locator(ROW).evaluate_all(
        "rows => rows.map(row => [row.dataset.id, [...row.cells].map(cell => cell.textContent)])"
    )
    return dict(rows)


def listed(page, total):
    """The rows, once the list says how many there are."""
    wait_until(page, f"document.querySelector('#sample-total').textContent.endsWith('{total}')")
    return shown(page)


def of(n):
    return f"of {n:,}" if n else "none"


def test_the_list_holds_the_newest_and_pages_to_the_oldest(served, watch, lines):
    page = watch(served("finished"), "samples").page
    records = records_of(lines)
    ids = list(records)
    rows = listed(page, of(len(ids)))
    assert len(rows) == 50 and set(rows) <= set(ids)
    for name, (step, kind, prompt, reward, finish, tokens, _) in rows.items():
        record = records[name]
        assert (step, kind[0], prompt) == (str(record["step"]), name[0], str(record["prompt_id"]))
        assert says(reward, record["total_reward"]) or record["reward_error"]
        assert (finish, tokens) == (record["finish_reason"], str(record["completion_tokens"]))
    steps = [int(cells[0]) for cells in rows.values()]
    assert steps == sorted(steps, reverse=True)
    seen = set(rows)
    while page.locator("#sample-older").is_enabled():
        before = page.inner_text("#sample-total")
        page.locator("#sample-older").click()
        wait_until(page, f"document.querySelector('#sample-total').textContent !== '{before}'")
        seen |= set(shown(page))
    assert seen == set(ids), "every completion is on some page"


def test_a_search_finds_what_the_files_hold(served, watch, lines):
    page = watch(served("finished"), "samples").page
    records = records_of(lines)
    word = next(iter(lines("finished", "samples")))["question"].split(": ")[1]
    page.locator("#sample-search").fill(word.upper())
    texts = ("question", "prompt", "completion", "answer")
    fitting = {
        name for name, r in records.items() if any(word in str(r.get(text, "")) for text in texts)
    }
    assert set(listed(page, of(len(fitting)))) == fitting


@pytest.mark.parametrize(
    "fill, fits",
    [
        ({"first": "5", "last": "7", "kind": "train"}, lambda r: 5 <= r["step"] <= 7),
        ({"prompt": "11"}, lambda r: r["prompt_id"] == 11),
        ({"finish": "length"}, lambda r: r["finish_reason"] == "length"),
        ({"reward_max": "0.5", "first": "1"}, lambda r: r["total_reward"] <= 0.5 and r["step"]),
        ({"why": "disagreement"}, lambda r: r.get("why") == "disagreement"),
        ({"error": True}, lambda r: bool(r["reward_error"])),
    ],
)
def test_a_filter_lists_those_that_fit(served, watch, lines, fill, fits):
    page = watch(served("finished"), "samples").page
    for name, text in fill.items():
        field = page.locator(f"#sample-{name}")
        if text is True:
            field.check()
        elif name in ("kind", "finish", "why"):
            field.select_option(text)
        else:
            field.fill(text)
    fitting = {name for name, record in records_of(lines).items() if fits(record)}
    rows = listed(page, of(len(fitting)))
    assert set(rows) <= fitting and len(rows) == min(50, len(fitting))
    assert all(f"{name}=" in page.url for name in fill), "the address holds the search"
    page.locator("#sample-clear").click()
    listed(page, of(len(records_of(lines))))


def test_one_completion_in_full(served, watch, lines):
    record = lines("finished", "samples")[30]
    page = watch(served("finished"), "samples?id=t30").page
    detail = page.locator("#sample-detail")
    detail.get_by_role("heading", name=f"Step {record['step']} · train").wait_for()
    text = detail.inner_text()
    for name in ("worker", "group_id", "finish_reason"):
        assert str(record[name]) in text
    assert record["question"] in text
    assert detail.locator(".special-token").first.inner_text() == "<|user|>"
    rewards = dict(
        page.get_by_test_id("rewards").evaluate(
            "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
        )
    )
    assert says(rewards.pop("total reward"), record["total_reward"])
    assert set(rewards) == set(record["rewards"])
    assert all(says(rewards[name], value) for name, value in record["rewards"].items())
    assert record["notes"]["judge"] == detail.get_by_role("group", name="note").inner_text()
    assert record["answer"] in page.get_by_test_id("answer-gold").inner_text()
    for parser in ("strict", "lenient"):
        assert str(record["parsed"][parser]) in page.get_by_test_id(f"answer-{parser}").inner_text()


def test_every_token_is_shaded_by_its_probability(served, watch, lines):
    record = lines("finished", "samples")[30]
    page = watch(served("finished"), "samples?id=t30").page
    page.get_by_test_id("tokens").wait_for()
    tokens = (
        page.get_by_test_id("tokens")
        .locator(".token")
        .evaluate_all("spans => spans.map(span => [span.textContent, span.className])")
    )
    assert len(tokens) == len(record["tokens"])
    bounds = (0.9, 0.5, 0.1, 0.01, 0.0)
    for (shown_text, classes), (text, logprob) in zip(tokens, record["tokens"], strict=True):
        assert shown_text.replace("↵", "") == text
        shade = next(i for i, least in enumerate(bounds) if math.exp(logprob) >= least)
        assert f"shade-{shade}" in classes, (text, logprob)
    page.get_by_test_id("tokens").locator(".token").first.hover()
    readout = page.get_by_test_id("token-readout").inner_text()
    assert f"logprob {record['tokens'][0][1]:.4f}".replace("-", "−") in readout


def test_the_same_prompt_over_time_is_set_side_by_side(served, watch, lines):
    page = watch(served("finished"), "samples?kind=eval&prompt=3").page
    assert len(listed(page, "of 2")) == 2, "evaluated at the start and at the end"
    page.get_by_role("radio", name="Same prompt over time").click()
    sides = page.get_by_test_id("same-prompt-side")
    sides.nth(1).wait_for()
    expected = [record for record in lines("finished", "eval") if record["prompt_id"] == 3]
    for i, record in enumerate(expected):
        text = sides.nth(i).locator(".model-text").text_content()
        assert "".join(text.split()) == "".join(record["completion"].split())


def test_keys_move_in_the_list_open_and_come_back(served, watch):
    page = watch(served("finished"), "samples").page
    page.locator(f"{ROW}[aria-selected=true]").focus()
    first = page.locator(f"{ROW}[aria-selected=true]").get_attribute("data-id")
    page.keyboard.press("ArrowDown")
    second = page.locator(f"{ROW}[aria-selected=true]").get_attribute("data-id")
    assert second != first
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('#sample-detail').contains(document.activeElement)")
    page.keyboard.press("Escape")
    wait_until(page, f"document.activeElement.dataset.id === '{second}'")
    assert table_rows(page, "[data-testid=sample-list]")
