"""Fleet of a replay, what-if and alerts: the page says what the files and the judgement say."""

import json
import urllib.request

import pytest

from services.process.phases import UNEXPLAINED, WAITS
from tests.dashboard.browser.reading import says
from tests.deadlines import HANG_S

pytestmark = pytest.mark.browser

SEVERITIES = ["bad", "warn", "info"]


def judgement_of(server):
    request = urllib.request.Request(
        f"{server.url}/api/judgement", headers={"Authorization": f"Bearer {server.tokens.view}"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=HANG_S).read())


def test_a_replay_shows_the_processes_as_the_last_step_left_them(served, watch, lines):
    page = watch(served("finished"), "fleet").page
    page.get_by_test_id("process-row").first.wait_for()
    ledger, metrics = lines("finished", "ledger")[-1], lines("finished", "metrics")[-1]
    rows = page.get_by_test_id("process-row").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[0] for row in rows] == list(ledger["processes"])
    for process, busy, host, device, peak in rows:
        phases = ledger["processes"][process]
        busy_s = sum(s for name, s in phases.items() if name not in (*WAITS, UNEXPLAINED))
        assert says(busy, busy_s / ledger["wall_s"])
        assert says(host, metrics.get(f"mem/{process}/host_bytes"))
        assert device == peak == "–", "the CPU has no memory of its own"
    assert page.locator("#add-worker").is_disabled()
    assert "run has ended" in page.inner_text("#fleet-why")


@pytest.mark.parametrize("kind, has", [("finished", "more"), ("grown", "fewer")])
def test_what_if_shows_predictions_and_how_right_past_ones_were(served, watch, kind, has):
    server = served(kind)
    page = watch(server, "what_if").page
    page.get_by_test_id("what-if-row").first.wait_for()
    said = judgement_of(server)["what_if"]
    rows = page.get_by_test_id("what-if-row").evaluate_all(
        """rows => rows.map(row =>
            [row.dataset.id, row.dataset.sure, ...[...row.cells].map(cell => cell.textContent)])"""
    )
    shown = {name: rest for name, *rest in rows}
    assert says(shown["now"][2], said["now"]["step_s"])
    assert set(shown) == {"now"} | {option["id"] for option in said["options"]}
    assert {has, "staleness_1", "half_length"} <= set(shown)
    for option in said["options"]:
        sure, title, step, _, change, _, note = shown[option["id"]]
        assert (sure, title, note) == (option["sure"], option["title"], option["note"])
        assert says(step, option["step_s"])
        if change != "the same":
            mark, share, *_ = change.split(" ")
            assert says(f"{share} %", abs(1 - option["ratio"]))
            assert mark == ("▼" if option["ratio"] < 1 else "▲")
            small = abs(1 - option["ratio"]) < said["error"]["median"]
            assert change.endswith("within the error") is small
    assert said["error"]["text"] == page.get_by_test_id("prediction-error").inner_text()


def test_what_if_sets_a_change_of_workers_beside_what_came_of_it(served, watch, lines):
    server = served("grown")
    page = watch(server, "what_if").page
    page.get_by_test_id("what-if-change").first.wait_for()
    workers = [len(record["processes"]) - 1 for record in lines("grown", "ledger")]
    changed = [step for step in range(2, 61) if workers[step] != workers[step - 1]]
    rows = page.get_by_test_id("what-if-change").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[1] for row in rows] == ["2 → 3", "1 → 2"]
    for row, step in zip(rows, reversed(changed), strict=True):
        assert step <= int(row[0]) <= step + 1, "the new worker's first step may only compile"
    walls = [record["wall_s"] for record in lines("grown", "ledger")]
    for step, _, _, actual, _ in rows:
        near = walls[int(step) : int(step) + 10]
        assert any(says(actual, wall) for wall in near) or (
            min(near) * 0.98 <= float(actual.removesuffix(" s")) <= max(near)
        )


@pytest.mark.parametrize("kind", ["finished", "nonfinite", "failed"])
def test_alerts_are_listed_worst_first_with_advice(served, watch, kind):
    server = served(kind)
    page = watch(server, "alerts").page
    said = judgement_of(server)["alerts"]
    rows = page.get_by_test_id("alert-row").evaluate_all(
        "rows => rows.map(row => [row.dataset.id, row.dataset.severity, row.textContent])"
    )
    assert [(name, severity) for name, severity, _ in rows] == [
        (alert["id"], alert["severity"]) for alert in said
    ]
    order = [SEVERITIES.index(severity) for _, severity, _ in rows]
    assert order == sorted(order)
    for alert, (_, _, text) in zip(said, rows, strict=True):
        text = text.lower()  # the page begins a sentence with a capital letter
        assert alert["text"].lower() in text and alert["advice"].lower() in text
        assert alert["since_step"] is None or f"since step {alert['since_step']}" in text
    count = len(said)
    words = f"{count} alerts" if count > 1 else "1 alert" if count else "no alerts"
    assert words in page.inner_text("#header-alerts")


def test_an_alert_leads_to_the_view_that_shows_it(served, watch):
    server = served("finished")
    page = watch(server, "alerts").page
    first = judgement_of(server)["alerts"][0]
    page.get_by_test_id("alert-row").first.get_by_role("button").click()
    page.locator(f"#view-{first['view']}").wait_for(state="visible")
    page.locator("#header-alerts").click()
    page.locator("#view-alerts").wait_for(state="visible")


def test_the_bottleneck_and_the_first_alerts_stand_beside_the_breakdown(served, watch):
    server = served("finished")
    page = watch(server, "breakdown").page
    said = judgement_of(server)
    sentence = said["bottleneck"]["text"].lower()
    page.get_by_test_id("bottleneck").get_by_text(said["bottleneck"]["text"][1:]).wait_for()
    assert page.get_by_test_id("bottleneck").inner_text().lower() == sentence
    assert page.inner_text("#header-bottleneck").lower() == sentence
    alerts = page.get_by_test_id("top-alerts").inner_text().lower()
    assert said["alerts"][0]["text"].lower() in alerts
