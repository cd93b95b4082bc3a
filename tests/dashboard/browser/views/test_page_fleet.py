"""The fleet of a run that goes on, asked of a real control server: its numbers and its changes."""

import dataclasses

import pytest

from benchmarks.made_run.made_run import MadeRun, RunPlan
from services.control.access import write_access
from services.control.messages import (
    Accepted,
    FleetStatus,
    LearnerStatus,
    NoSuchWorker,
    NotNow,
    ScalingPolicy,
    WorkerState,
    WorkerStatus,
)
from services.control.service import control_service
from services.wire.server import Server
from tests.chromium import wait_for
from tests.dashboard.browser.page_server import Handed
from tests.dashboard.browser.reading import says

pytestmark = pytest.mark.browser

HOSTILE = "rollout-2<img src=x onerror='window.attacked=1'>"
ERROR = "</td><script>window.attacked=1</script> out of memory"
WORKERS = (
    WorkerStatus(
        name="rollout-0",
        state=WorkerState.WORKING,
        policy_version=7,
        host="box-a",
        pid=4001,
        groups_leased=8,
        groups_done=120,
        tokens_per_s=2345.6,
        slots=64,
        host_bytes=1_234_000_000,
        device_bytes=3_400_000_000,
        device_peak_bytes=5_600_000_000,
        pull_gb_per_s=1.23,
    ),
    WorkerStatus(
        name="rollout-1",
        state=WorkerState.READY,
        policy_version=6,
        restarts=2,
        last_error=ERROR,
    ),
    WorkerStatus(name=HOSTILE, state=WorkerState.STARTING, host="<b>box</b>"),
)
LEARNER = LearnerStatus(
    doing="updates", policy_version=7, restarts=1, host_bytes=2_000_000_000, pid=77
)


class Driver:
    """Holds three workers of at most four, and does what it is asked or says why not."""

    def __init__(self):
        self.workers = WORKERS
        self.target = 3
        self.refusal: Exception | None = None

    def fleet(self) -> FleetStatus:
        return FleetStatus(
            target=self.target,
            least=1,
            most=4,
            policy=ScalingPolicy.FIXED,
            policy_version=7,
            workers=self.workers,
            groups_waiting=5,
            groups_out=11,
            learner=LEARNER,
        )

    def scale(self, target: int, timeout_s: float) -> Accepted:
        if self.refusal:
            raise self.refusal
        self.target = target
        new = WorkerStatus(name=f"rollout-{target - 1}", state=WorkerState.STARTING)
        self.workers = (*self.workers, new)
        return Accepted(target=target, current=2)

    def drain(self, name: str, timeout_s: float) -> Accepted:
        if self.refusal:
            raise self.refusal
        self.target -= 1
        leaving = WorkerState.DRAINING
        self.workers = tuple(
            dataclasses.replace(one, state=leaving) if one.name == name else one
            for one in self.workers
        )
        return Accepted(target=self.target, current=2)


@pytest.fixture
def driver(tmp_path, authority):
    """The driver of a run of this process."""
    run = MadeRun(tmp_path / "run", RunPlan(steps=30))
    for _ in range(4):
        run.write_step()
    run.progress()
    driver = Driver()
    with Server(authority.issue("driver"), [control_service(driver)]) as server:
        write_access(run.folder, server.address, authority.issue("control"))
        driver.folder = run.folder
        yield driver


@pytest.fixture
def handed(driver):
    server = Handed(driver.folder)
    server.start()
    yield server
    server.close()


@pytest.fixture
def watched(handed, watch):
    watched = watch(handed, "fleet")
    watched.page.get_by_test_id("worker-row").first.wait_for()
    return watched


def cells(page, worker):
    row = page.locator(f"tr[data-worker={worker}]")
    return row.evaluate("row => [...row.cells].map(cell => cell.innerText)")


def change(page, token):
    page.locator("#control-token").fill(token)
    page.locator("#confirm-ok").click()


def test_every_worker_is_shown_with_what_the_driver_says(watched):
    page = watched.page
    row = cells(page, "rollout-0")
    assert row[0] == "rollout-0" and row[1].split() == ["●", "working"]
    assert row[2].split() == ["7", "current"]
    leased, slots, tokens, pull, memory, device, done, restarts, place = row[3:12]
    assert (leased, slots, done, restarts) == ("8", "64", "120", "0")
    assert says(tokens, 2345.6) and says(pull, 1.23) and says(memory, 1.234e9)
    now, peak = device.split("peak")
    assert says(now, 3.4e9) and says(peak, 5.6e9)
    assert "box-a" in place and "4001" in place
    assert cells(page, "rollout-1")[2].split() == ["6", "1", "behind"]
    assert cells(page, "rollout-1")[10] == "▲ 2"
    assert says(cells(page, "learner")[7], 2e9)
    for tile, text in (("target", "3"), ("serving", "2"), ("version", "7"), ("waiting", "5")):
        value = page.get_by_test_id(f"fleet-{tile}").locator(".tile-value")
        assert value.inner_text() == text, tile
    wanted = page.get_by_test_id("fleet-target")
    assert wanted.locator(".tile-more").inner_text() == "manual, 1 to 4"
    head = page.locator(".fleet-table th", has_text="tokens/s with waits")
    assert "last 10 s of wall time" in (head.get_attribute("title") or "")
    about = page.get_by_role("heading", name="Tokens a second, without waits")
    assert "the table includes waiting time" in (about.get_attribute("title") or "")


def test_names_and_errors_of_workers_are_text(watched):
    page = watched.page
    text = page.locator("#view-fleet").inner_text()
    assert HOSTILE in text and f"last error: {ERROR}" in text and "<b>box</b>" in text
    assert page.locator("#view-fleet img, #view-fleet b, #view-fleet script").count() == 0
    assert page.evaluate("window.attacked") is None


def test_a_worker_is_added_after_the_confirmation_with_the_token(watched, handed, driver):
    page = watched.page
    page.locator("#add-worker").click()
    dialog = page.get_by_role("dialog", name="Add a rollout worker?")
    dialog.wait_for(state="visible")
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert driver.target == 3, "nothing is asked for without a confirmation"
    page.locator("#add-worker").click()
    change(page, handed.tokens.control)
    said = page.locator("#fleet-status", has_text="Accepted at")
    said.wait_for()
    assert said.inner_text().endswith(": one more worker; new target: 4.")
    wait_for(page, lambda: page.get_by_test_id("worker-row").count() == 4, "a fourth worker")
    assert driver.target == 4
    assert page.locator("#add-worker").is_disabled(), "four are the most"


def test_a_worker_is_drained_and_the_token_need_not_be_given_again(watched, handed, driver):
    page = watched.page
    for i, name in enumerate(("rollout-0", "rollout-1")):
        page.locator(f"[data-testid=drain][data-worker={name}]").click()
        if i == 0:
            page.locator("#control-token").fill(handed.tokens.control)
        page.locator("#confirm-ok").click()
        page.locator(f"tr[data-worker={name}][data-state=draining]").wait_for()
    assert driver.target == 1


def test_a_wrong_token_is_refused_with_the_servers_words_and_kept_nowhere(watched, handed, driver):
    watched.allow("status of 401")
    page = watched.page
    for token in ("wrong-token", handed.tokens.view):
        if not page.locator("#confirm-dialog").is_visible():
            page.locator("#add-worker").click()
        change(page, token)
        page.locator("#confirm-error", has_text="the control token is missing or wrong").wait_for()
        wait_for(page, page.locator("#confirm-ok").is_enabled, "the answer")
    assert driver.target == 3
    page.locator("#confirm-cancel").click()
    page.locator("#add-worker").click()
    assert page.locator("#control-token").input_value() == ""


@pytest.mark.parametrize(
    "refusal, status",
    [
        (NotNow("the run is ending <b>now</b>"), 409),
        (NoSuchWorker("there is no rollout worker 'rollout-0'"), 404),
        (TimeoutError("the driver was busy"), 504),
    ],
)
def test_a_refusal_of_the_driver_is_shown_in_its_words(watched, handed, driver, refusal, status):
    watched.allow(f"status of {status}")
    page = watched.page
    driver.refusal = refusal
    page.locator("[data-testid=drain][data-worker=rollout-0]").click()
    change(page, handed.tokens.control)
    said = page.locator("#confirm-error")
    said.wait_for(state="visible")
    assert said.inner_text() == str(refusal)
