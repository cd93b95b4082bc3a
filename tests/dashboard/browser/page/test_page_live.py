"""The page while a run goes on: it follows, says when the run ends, and comes back by itself."""

import json
import re
import shutil

import pytest

from benchmarks.made_run.made_run import MadeRun, RunPlan
from tests.chromium import open_view, table_rows, wait_for, wait_until
from tests.dashboard.browser.page_server import Handed
from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

GONE = "net::ERR_"
"""What a browser says of a server that is not there, or goes while it answers."""
BANNER = "#banner"


@pytest.fixture
def run(tmp_path):
    """A run of this process that has closed six steps and goes on."""
    made = MadeRun(tmp_path / "run", RunPlan(steps=30))
    for _ in range(7):
        made.write_step()
    made.progress()
    return made


@pytest.fixture
def handed(run):
    server = Handed(run.folder)
    server.start()
    yield server
    server.close()


def wait_for_step(page, step):
    wait_until(page, f"document.querySelector('#header-step').textContent === '{step} / 30'")


def metrics_of(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").open(encoding="utf-8")]


def wait_for_loss(page, metrics):
    """Waits until the chart of the loss names that of one step."""
    loss = page.get_by_test_id("chart-loss").locator(".chart-value strong")
    wait_for(page, lambda: says(loss.inner_text(), metrics["train/loss"]), "the newest loss")


def banner(page, kind):
    """Waits for a banner of a kind and returns what it says."""
    page.locator(f"{BANNER}[data-banner={kind}]").wait_for(state="visible")
    return page.inner_text(BANNER)


def put_in_place(again, run):
    """Replaces the logs of a run by those of another one."""
    for name in ("metrics", "ledger", "timeline", "samples", "eval"):
        new = again.folder / f"{name}.new"
        shutil.copy(again.folder / f"{name}.jsonl", new)
        new.replace(run.folder / f"{name}.jsonl")


def go_on(run, steps):
    for _ in range(steps):
        run.write_step()
        run.progress()


def test_steps_that_close_come_to_the_page(run, handed, watch):
    page = watch(handed, "learning").page
    wait_for_step(page, 6)
    assert page.inner_text("#header-state").endswith("running")
    go_on(run, 2)
    wait_for_step(page, 8)
    newest = metrics_of(run)[8]
    wait_for_loss(page, newest)
    assert says(page.inner_text("#header-reward"), newest["reward/total/mean"])


@pytest.mark.parametrize("view", ["breakdown", "timeline", "samples", "trust"])
def test_the_view_that_is_shown_grows_with_the_run(run, handed, watch, view):
    page = watch(handed, view).page
    go_on(run, 3)
    if view == "breakdown":
        page.locator("#breakdown-table-button").click()
        wait_until(
            page,
            "document.querySelector('[data-testid=breakdown-table] tbody td').textContent === '9'",
        )
    elif view == "timeline":
        page.locator("#timeline-table-button").click()
        wait_until(
            page,
            "document.querySelector('[data-testid=timeline-table] tbody td').textContent === '9'",
        )
    elif view == "samples":
        wait_until(
            page, "document.querySelector('[data-testid=sample-row] td').textContent === '9'"
        )
    else:
        wait_until(page, "tandem.store.judgement.step === 9")
        page.get_by_test_id("trust-row").first.wait_for()


@pytest.mark.parametrize(
    "state, reason", [("finished", ""), ("failed", "RuntimeError: no memory"), ("interrupted", "")]
)
def test_a_run_that_ends_while_it_is_watched_says_so_and_stays(run, handed, watch, state, reason):
    watched = watch(handed, "breakdown")
    watched.allow(GONE)
    page = watched.page
    wait_for_step(page, 6)
    go_on(run, 1)
    run.end(state, reason)
    said = banner(page, state)
    assert "step 7" in said and reason in said
    status = json.loads((run.folder / "status.json").read_text())
    took = re.search(r", (.*) after it was started or resumed", said)
    assert took and says(took[1], status["ended"] - status["started"])
    assert page.inner_text("#header-state").endswith(state)
    page.wait_for_timeout(1500)
    handed.close()  # as the driver does at its end
    page.wait_for_timeout(3000)
    assert banner(page, state).startswith(said), "that nobody answers any more is no news"
    assert page.locator("[data-testid=breakdown-chart] canvas").first.is_visible()
    assert page.inner_text("#header-step") == "7 / 30"
    open_view(page, "learning")
    page.get_by_test_id("chart-loss").locator("canvas").wait_for()


def test_views_that_were_not_opened_before_the_end_have_something_to_show(run, handed, watch):
    watched = watch(handed, "breakdown")
    watched.allow(GONE)
    page = watched.page
    wait_for_step(page, 6)
    go_on(run, 1)
    run.end()
    handed.end()  # at once, as the driver does
    page.locator(BANNER, has_text=f"python -m dashboard --run {run.folder}").wait_for()
    open_view(page, "timeline")
    page.locator("#timeline-table-button").click()
    assert table_rows(page, "[data-testid=timeline-table]")[0][0] == "7"
    open_view(page, "samples")
    newest = [json.loads(line) for line in (run.folder / "samples.jsonl").open()][-1]
    rows = page.get_by_test_id("sample-row")
    assert rows.first.locator("td").first.inner_text() == "7"
    assert newest["question"] in page.locator("#sample-detail").inner_text()
    rows.nth(1).click()
    page.locator("#sample-detail", has_text=f"--run {run.folder}").wait_for()
    open_view(page, "samples?first=3")
    page.locator("#view-samples [role=alert]", has_text=f"--run {run.folder}").wait_for()
    page.locator("#sample-clear").click()
    rows.first.wait_for()
    open_view(page, "trust")
    page.get_by_test_id("staleness-bar").first.wait_for()
    page.locator("#view-trust .mini-line").first.wait_for(state="attached")  # of a check
    open_view(page, "fleet")
    page.locator("#view-fleet .mini-line").nth(3).wait_for(state="attached")


def test_a_page_that_has_all_of_an_ended_run_lets_its_server_end(run, handed, watch):
    watched = watch(handed, "breakdown")
    watched.allow(GONE)
    page = watched.page
    page.evaluate(
        """() => { tandem.heard = []; tandem.store.on(({ type, data }) => {
            if (type === "connection") tandem.heard.push(data.state) }) }"""
    )
    run.end()
    wait_until(page, "tandem.heard.includes('waiting')")  # though the server has not ended
    wait_until(page, "tandem.heard.at(-1) === 'live'")
    banner(page, "finished")


def test_a_server_that_is_killed_leaves_the_page_and_is_found_again(run, handed, watch):
    watched = watch(handed, "learning")
    watched.allow(GONE)
    page = watched.page
    wait_for_step(page, 6)
    handed.kill()
    assert "The page shows step 6" in banner(page, "disconnected")
    assert page.get_by_test_id("chart-loss").locator("canvas").is_visible()
    go_on(run, 4)
    page.wait_for_timeout(1500)
    assert page.locator(BANNER).is_visible(), "the banner stays for as long as nobody answers"
    handed.start()
    wait_for_step(page, 10)
    page.locator(BANNER).wait_for(state="hidden")
    wait_for_loss(page, metrics_of(run)[10])
    page.locator("#learning-table-button").click()
    rows = table_rows(page, "[data-testid=learning-table]")
    assert [row[0] for row in rows] == [str(step) for step in range(10, -1, -1)], "no gap"


def test_a_server_with_other_tokens_asks_for_a_new_link(handed, watch):
    watched = watch(handed, "learning")
    watched.allow(GONE)
    watched.allow("status of 401")
    page = watched.page
    wait_for_step(page, 6)
    page.context.clear_cookies()  # as with a driver that was started again, and its new tokens
    handed.kill()
    handed.start()
    assert "--link" in banner(page, "refused")
    assert page.get_by_test_id("chart-loss").locator("canvas").is_visible()


def test_a_run_rewound_at_a_resume_is_read_anew(run, handed, watch, tmp_path):
    page = watch(handed, "learning").page
    wait_for_step(page, 6)
    again = MadeRun(tmp_path / "again", RunPlan(steps=30, seed=9))
    go_on(again, 5)
    put_in_place(again, run)
    wait_for_step(page, 4)
    page.locator("#learning-table-button").click()
    wait_until(
        page, "document.querySelectorAll('[data-testid=learning-table] tbody tr').length === 5"
    )
    metrics = metrics_of(again)
    head = page.get_by_test_id("learning-table").locator("th").all_inner_texts()
    for row in table_rows(page, "[data-testid=learning-table]"):
        assert says(row[head.index("train/loss")], metrics[int(row[0])].get("train/loss"))


def test_a_run_rewound_while_the_server_was_down_is_loaded_again(run, handed, watch, tmp_path):
    watched = watch(handed, "learning")
    watched.allow(GONE)
    wait_for_step(watched.page, 6)
    handed.kill()
    again = MadeRun(tmp_path / "again", RunPlan(steps=30, seed=9))
    go_on(again, 7)  # as many as before
    put_in_place(again, run)
    handed.start()
    wait_for_loss(watched.page, metrics_of(again)[6])


def test_a_run_without_a_step_says_what_it_waits_for(tmp_path, serve, watch):
    made = MadeRun(tmp_path / "run", RunPlan(steps=30))
    page = watch(serve("--run", made.folder), "breakdown").page
    for view in [
        "breakdown",
        "timeline",
        "learning",
        "trust",
        "samples",
        "fleet",
        "what_if",
        "alerts",
    ]:
        open_view(page, view)
        assert page.locator(f"#view-{view}").inner_text().strip(), view
    for view in ("breakdown", "timeline", "learning"):
        assert "No step has closed yet" in page.locator(f"#view-{view}").text_content(), view
    made.write_step()
    made.write_step()
    made.progress()
    open_view(page, "breakdown")
    wait_for_step(page, 1)
    page.locator("[data-testid=breakdown-chart] canvas").first.wait_for(state="visible")


def test_a_driver_that_is_gone_is_said_to_be_lost(run, handed, watch):
    page = watch(handed, "breakdown").page
    wait_for_step(page, 6)
    path = run.folder / "status.json"
    status = json.loads(path.read_text()) | {"pid": 2**22 + 1}
    path.with_suffix(".new").write_text(json.dumps(status))
    path.with_suffix(".new").replace(path)
    assert "ended without a reason" in banner(page, "lost")
