"""The timeline shows the spans, marks and gauges of timeline.jsonl, and gives them to Perfetto."""

import collections
import json
import re

import pytest

from benchmarks.made_run.made_run import MadeRun, RunPlan
from services.process.phases import PHASES
from tests.chromium import open_view, table_rows, wait_until
from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

CHART = "[data-testid=timeline-chart]"
TITLES = "Object.fromEntries(tandem.store.run.phases.map(p => [tandem.store.phaseTitle(p), p]))"


def steps_of(lines, kind, first, last):
    return [record for record in lines(kind, "timeline") if first <= record["step"] <= last]


def test_the_table_holds_every_span_and_mark_of_the_steps(served, watch, lines):
    page = watch(served("finished"), "timeline?first=19&last=21").page
    titles = page.evaluate(TITLES)
    page.locator("#timeline-table-button").click()
    shown = collections.defaultdict(list)
    for step, after, process, what, seconds in table_rows(page, "[data-testid=timeline-table]"):
        shown[int(step), process].append((after, titles.get(what, what), seconds))
    for record in steps_of(lines, "finished", 19, 21):
        for process, lane in record["processes"].items():
            rows = shown[record["step"], process]
            expected = [(t, PHASES[phase], s) for phase, t, s in lane["spans"]]
            expected += [(t, text, None) for t, text in lane["marks"]]
            for t, what, seconds in expected:
                assert any(
                    name == what and says(after, t) and says(text, seconds)
                    for after, name, text in rows
                ), (record["step"], process, t, what, seconds)
    assert "checkpoint 20" in {what for _, what, _ in shown[20, "learner"]}


def test_hovering_names_the_span_and_the_queue_at_that_time(served, watch, lines):
    page = watch(served("finished"), "timeline?first=10&last=10").page
    titles = page.evaluate(TITLES)
    [record] = steps_of(lines, "finished", 10, 10)
    box = page.locator(f"{CHART} canvas").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30)
    page.locator(".tooltip").wait_for(state="visible")
    process, where = (
        page.locator(f".tooltip .tip-head {tag}").inner_text() for tag in ("strong", "span")
    )
    at = re.fullmatch(r"step 10, \+(.*)", where)
    assert at, where
    title, seconds = page.locator(".tooltip .phase-name").inner_text().strip().rsplit("\n", 1)
    phase = PHASES.index(titles[title.strip()])
    spans = [span for span in record["processes"][process]["spans"] if span[0] == phase]
    assert any(says(seconds, duration) for _, _, duration in spans), (seconds, spans)
    gauges = dict(table_rows(page, ".tooltip .tip-table"))
    values = [
        gauge
        for gauge in record["gauges"]
        if says(gauges["groups waiting"], gauge[1]) and says(gauges["groups out"], gauge[2])
    ]
    assert values and says(gauges["policy version"], values[0][3])


def test_keys_move_from_span_to_span_and_enter_opens_the_step(served, watch):
    page = watch(served("finished"), "timeline?first=10&last=11").page
    page.locator(CHART).focus()
    said = page.locator("#view-timeline [aria-live=polite]")
    seen = set()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "+"):
        page.keyboard.press(key)
        seen.add(said.text_content())
    assert len(seen) >= 3 and any("rollout-0" in text for text in seen)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=re.compile(r"Step 1[01]")).wait_for()


def test_the_export_is_a_trace_with_the_seconds_of_the_file(served, watch, lines):
    page = watch(served("finished"), "timeline?first=5&last=7").page
    with page.expect_download() as download:
        page.locator("#timeline-export").click()
    trace = json.loads(download.value.path().read_text())
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    } | {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert {"learner", "rollout-0", "rollout-1"} <= {n.split(" ")[-1] for n in names.values()}
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    expected = sum(
        duration
        for record in steps_of(lines, "finished", 5, 7)
        for lane in record["processes"].values()
        for phase, _, duration in lane["spans"]
        if PHASES[phase] == "decode"
    )
    shown = sum(event["dur"] for event in spans if event["name"] == "decode") / 1e6
    assert shown == pytest.approx(expected, abs=1e-3)


def test_the_window_and_the_steps_chosen_are_what_is_loaded(served, watch):
    page = watch(served("finished"), "timeline?last_s=30").page
    page.get_by_role("button", name="Table").click()
    rows = table_rows(page, "[data-testid=timeline-table]")
    assert {row[0] for row in rows} <= {str(step) for step in range(20, 41)}
    page.get_by_label("first step").fill("3")
    page.get_by_label("last step").fill("4")
    page.get_by_role("button", name="Show").click()
    wait_until(page, "location.hash === '#timeline?first=3&last=4'")
    cells = "[...document.querySelectorAll('[data-testid=timeline-table] td:first-child')]"
    wait_until(page, f"{cells}.every(cell => ['3', '4'].includes(cell.textContent))")
    assert {row[0] for row in table_rows(page, "[data-testid=timeline-table]")} == {"3", "4"}


def test_too_many_new_steps_are_loaded_as_history(tmp_path, serve, watch):
    run = MadeRun(tmp_path / "run", RunPlan(steps=30))
    for _ in range(3):
        run.write_step()
    run.progress()
    watched = watch(serve("--run", run.folder), "timeline")
    watched.allow("status of 422")
    page = watched.page
    page.route(
        "**/api/timeline?first=*", lambda route: route.fulfill(status=422, json={"error": "many"})
    )
    page.locator("#timeline-table-button").click()
    run.write_step()
    run.progress()
    newest = "document.querySelector('[data-testid=timeline-table] tbody td').textContent"
    wait_until(page, f"{newest} === '3'")


def test_steps_without_a_timeline_say_so(served, watch):
    page = watch(served("finished"), "timeline").page
    open_view(page, "timeline?first=900&last=901")
    page.get_by_text("No timeline of these steps").wait_for()
