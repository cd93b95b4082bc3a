"""The page of a real run in a real browser: it follows the run, changes its fleet, and stays."""

import json
import pathlib
import signal

import pytest

from dashboard import auth
from driver.accounting.jsonl import read_lines
from tests.chromium import Watched, chromium, open_view, wait_for, wait_until_drawn, why_missing
from tests.deadlines import HANG_S
from tests.driver.service_run import Service, write_model_and_data

STEPS = 900
"""The test ends the run itself: however slow the machine is, no step has to be waited for."""
GONE = "net::ERR_"
"""What the browser says of a server that ends with its run."""
SLOW = {"name": "tests.slow_reward:score", "params": {"seconds": 0.1}}
"""A step takes about a second, and the machine is left to the browser."""
SETTINGS = [
    f"run.steps={STEPS}",
    "rollout.workers={min: 1, max: 2}",
    "placement.rollout.cpus=0.25",
    f"reward.functions={json.dumps([SLOW])}",
    "eval.every_steps=0",
    "eval.at_end=false",
    "checkpoint.every_steps=0",
    "checkpoint.export_hf=false",
    "log.dashboard.port=0",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service,
    pytest.mark.browser,
]


class LongRun(Service):
    """A run with one worker at first that goes on until it is ended."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path):
        super().__init__(folder, model, *(part for one in SETTINGS for part in ("--set", one)))

    def access(self) -> tuple[str, auth.Tokens]:
        """URL and tokens, once the dashboard answers and the control service is there."""
        self.wait_for((self.out / "control" / "key.pem").exists, "its control service")
        return auth.read_access(self.out / "dashboard")

    def step(self) -> int:
        """The last one that metrics.jsonl holds; 0 before the first."""
        return max((line["step"] for line in read_lines(self.out / "metrics.jsonl")), default=0)


@pytest.fixture
def run(tmp_path, tmp_path_factory):
    if why := why_missing():
        pytest.skip(why)
    run = LongRun(tmp_path, write_model_and_data(tmp_path_factory.mktemp("model")))
    yield run
    run.kill()


@pytest.fixture
def watched(run):
    with chromium() as browser:
        page = Watched(browser)
        yield page
        page.context.close()
        page.check()


def shown_step(page) -> int:
    return int(page.inner_text("#header-step").split(" / ")[0].replace("–", "0"))


def confirm(page, token: str) -> None:
    """Fills the dialog that a change opens, and sends it."""
    page.locator("#control-token").fill(token)
    page.locator("#confirm-ok").click()


def states(page) -> dict[str, str]:
    """Worker -> state, as the fleet's table has them."""
    rows = page.get_by_test_id("worker-row").evaluate_all(
        "rows => rows.map(row => [row.dataset.worker, row.dataset.state])"
    )
    return dict(rows)


def test_a_page_follows_a_run_changes_its_fleet_and_stays_when_it_ends(run, watched):
    watched.allow(GONE)
    watched.allow("status of 401")
    page = watched.page
    url, tokens = run.access()
    page.goto(auth.link(url, tokens) + "#breakdown")
    wait_until_drawn(page)
    assert page.inner_text("#header-state").endswith("running")

    wait_for(page, lambda: shown_step(page) >= 2, "two steps on the page", HANG_S)
    before = shown_step(page)
    wait_for(page, lambda: shown_step(page) > before, "a step more", HANG_S)
    assert shown_step(page) <= run.step(), "the page shows what the log holds"

    open_view(page, "fleet")
    wait_for(page, lambda: len(states(page)) == 1, "the one worker")
    page.locator("#add-worker").click()
    confirm(page, "wrong-token")
    refusal = page.locator("#confirm-error")
    refusal.wait_for(state="visible")
    assert "the control token is missing or wrong" in refusal.inner_text()
    confirm(page, tokens.control)
    page.locator("#fleet-status", has_text="Accepted").wait_for()
    wait_for(page, lambda: len(states(page)) == 2, "a second worker")
    working = ("ready", "working")

    def is_up():
        return all(state in working for state in states(page).values())

    wait_for(page, lambda: is_up() or run.process.poll() is not None, "it to work", HANG_S)
    assert len(states(page)) == 2 and is_up()
    assert page.locator("#add-worker").is_disabled(), "rollout.workers.max is reached"

    page.locator("[data-testid=drain][data-worker=rollout-1]").click()
    confirm(page, tokens.control)
    page.locator("#fleet-status", has_text="rollout-1 drains").wait_for()
    wait_for(page, lambda: states(page).get("rollout-1", "gone") == "gone", "it to be gone")

    run.process.send_signal(signal.SIGINT)
    ended = page.locator("#banner[data-banner=interrupted]")
    ended.wait_for(state="visible", timeout=HANG_S * 1e3)
    assert run.process.wait(HANG_S) == 130, run.text
    page.wait_for_timeout(2000)
    assert ended.is_visible() and page.inner_text("#header-state").endswith("interrupted")
    assert page.inner_text("#header-step") == f"{run.step()} / {STEPS}"
    open_view(page, "breakdown")
    assert page.locator("[data-testid=breakdown-chart] canvas").first.is_visible()
    processes = {
        name for line in read_lines(run.out / "ledger.jsonl") for name in line["processes"]
    }
    assert processes == {"learner", "rollout-0", "rollout-1"}
    assert page.locator(".row-label", has_text="rollout-1").count() == 1
