"""Who gets in, and that the token does not stay where others see it."""

import urllib.error
import urllib.request

import pytest

from dashboard import auth
from tests.deadlines import HANG_S

pytestmark = pytest.mark.browser

REFUSED = "status of 401"


def test_the_link_opens_the_page_and_the_token_leaves_the_address(served, watch):
    server = served("finished")
    page = watch(server, "trust").page
    assert page.url == f"{server.url}/#trust"
    assert server.tokens.view not in page.evaluate("document.documentElement.outerHTML")
    assert page.evaluate("document.cookie") == "", "scripts do not see the cookie"
    assert page.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)") == "{}{}"
    [cookie] = page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    page.reload()
    page.get_by_role("tab", name="Trust").wait_for()


def test_without_a_token_a_form_asks_for_it_and_lets_one_in(served, watch):
    server = served("finished")
    watched = watch()
    watched.allow(REFUSED)
    page = watched.page
    page.goto(server.url)
    assert "This dashboard needs a token" in page.inner_text("h1")
    assert "--link" in page.inner_text("body"), "it says how to get one"
    page.get_by_label("Token").fill("wrong-token")
    page.keyboard.press("Enter")
    page.get_by_text("not the token of this run").wait_for()
    page.get_by_label("Token").fill(server.tokens.view)
    page.keyboard.press("Enter")
    page.locator("#header-run").wait_for()
    assert page.url == f"{server.url}/"


def test_a_wrong_token_opens_no_part_of_the_api(served):
    server = served("finished")
    for path in ("/api/run", "/api/history", "/api/stream", "/metrics", "/static/app.js"):
        for token in ("", "wrong-token"):
            request = urllib.request.Request(
                server.url + path, headers={"Authorization": f"Bearer {token}"}
            )
            with pytest.raises(urllib.error.HTTPError) as refusal:
                urllib.request.urlopen(request, timeout=HANG_S)
            assert refusal.value.code == 401, path


def test_a_token_that_ends_while_the_page_is_open_is_said_and_the_page_stays(served, watch):
    server = served("finished")
    watched = watch(server)
    watched.allow(REFUSED)
    page = watched.page
    page.context.clear_cookies()
    page.evaluate("tandem.store.refetch()")
    banner = page.locator("#banner[data-banner=refused]")
    banner.wait_for(state="visible")
    assert "--link" in banner.inner_text(), "it says how to get a new one"
    assert page.locator("[data-testid=breakdown-chart] canvas").first.is_visible()


def test_the_link_of_another_run_is_refused(served, watch):
    mine, other = served("finished"), served("stale")
    watched = watch()
    watched.allow(REFUSED)
    watched.page.goto(auth.link(mine.url, other.tokens))
    assert "not the token of this run" in watched.page.inner_text("body")
