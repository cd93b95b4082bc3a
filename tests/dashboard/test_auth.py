"""Who may look and who may command, and that no token is left anywhere."""

import logging
import os
import stat

import httpx
import pytest

from benchmarks.made_run.made_run import make_run
from dashboard import auth
from dashboard.app import ENDPOINTS
from dashboard.auth import Gate, NoLink, Tokens, _cookie_name
from dashboard.guard import SECURITY_HEADERS
from tests.dashboard.served import served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, steps=4)
    with served(folder) as site:
        yield site


@pytest.fixture
def browser(site):
    """Sends what it was given, and follows nothing by itself."""
    with httpx.Client(base_url=site.url, trust_env=False) as client:
        yield client


PATHS = [
    (one.method, one.path.replace("{step}", "1").replace("{id}", "t1"))
    for one in ENDPOINTS
    if one.path != "/healthz"
]


@pytest.mark.parametrize("method, path", [*PATHS, ("GET", "/static/app.js"), ("GET", "/api/x")])
@pytest.mark.parametrize(
    "shown", ["", "wrong", "Basic", "cookie", "of another kind"], ids=lambda text: text or "none"
)
def test_without_its_token_every_path_but_health_is_closed(site, browser, method, path, shown):
    headers, view = {}, site.tokens.view
    if shown == "wrong":
        headers["authorization"] = f"Bearer {view[:-1]}"
    elif shown == "Basic":
        headers["authorization"] = f"Basic {view}"
    elif shown == "cookie":
        headers["cookie"] = f"{_cookie_name('made')}=wrong; {_cookie_name('other')}={view}"
    elif shown == "of another kind":
        headers["x-token"] = view
    response = browser.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["content-security-policy"].startswith("default-src 'self'")
    assert (
        response.headers["content-security-policy"] == SECURITY_HEADERS["content-security-policy"]
    )
    if path == "/":
        assert "--link" in response.text and 'name="token"' in response.text
    else:
        assert "--link" in response.json()["error"]


def test_health_needs_no_token(browser):
    assert browser.get("/healthz").json() == {"ok": True}


def test_the_view_token_does_not_command(site):
    with site.client() as client:
        answer = client.post("/api/fleet", json={"target": 3})
    assert answer.status_code == 401 and "control token" in answer.json()["error"]


def test_the_control_token_opens_the_pages_too(site):
    with site.client(site.tokens.control) as client:
        assert client.get("/api/run").status_code == 200


def test_a_cookie_never_commands_even_if_it_holds_the_control_token(site, browser):
    cookie = f"{_cookie_name('made')}={site.tokens.control}"
    answer = browser.post("/api/fleet", json={"target": 3}, headers={"cookie": cookie})
    assert answer.status_code == 401


def test_the_link_sets_a_cookie_and_leads_to_the_url_without_its_token(site, browser):
    answer = browser.get("/", params={"token": site.tokens.view, "theme": "dark"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?theme=dark")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and "Path=/" in cookie
    assert answer.headers["cache-control"] == "no-store"
    assert browser.get("/api/run").status_code == 200, "by its cookie"


def test_a_link_that_another_site_leads_to_goes_on_by_a_page_of_ours(site, browser):
    answer = browser.get(
        "/", params={"token": site.tokens.view}, headers={"sec-fetch-site": "cross-site"}
    )
    assert answer.status_code == 200 and 'content="0;url=/"' in answer.text
    assert site.tokens.view not in answer.text and "set-cookie" in answer.headers


def test_a_wrong_token_in_the_link_is_refused_whatever_the_cookie_says(site, browser):
    browser.get("/", params={"token": site.tokens.view})
    answer = browser.get("/", params={"token": "wrong"})
    assert answer.status_code == 401 and "not the token of this run" in answer.text


def test_a_link_leads_to_no_other_host(site, browser):
    answer = browser.get(f"{site.url}//evil.example/x?token={site.tokens.view}")
    assert answer.headers["location"] == "/evil.example/x"


@pytest.mark.parametrize(
    "host, status",
    [
        ("127.0.0.1:1", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("", 421),
        ("[", 421),
        ("[::1", 421),
    ],
)
def test_on_loopback_a_foreign_host_name_is_refused(site, host, status):
    with site.client() as client:
        answer = client.get("/api/run", headers={"host": host})
    assert answer.status_code == status


def test_another_sites_page_may_not_command(site):
    with site.client(site.tokens.control) as client:
        headers = {"origin": "http://evil.example"}
        answer = client.post("/api/fleet", json={"target": 3}, headers=headers)
        assert answer.status_code == 403
        answer = client.post("/api/fleet", json={"target": 3}, headers={"origin": "http://["})
        assert answer.status_code == 403, "of no site at all"
        answer = client.post("/api/fleet", json={"target": 3}, headers={"origin": site.url})
        assert answer.status_code == 409, "let in; the run is over"


def test_no_token_is_ever_logged(site, browser, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        browser.get("/", params={"token": site.tokens.view})
        browser.get("/nowhere", params={"token": site.tokens.view})
        browser.get("/api/step/x", headers={"authorization": f"Bearer {site.tokens.control}"})
    out = capfd.readouterr()
    said = "".join(
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    )  # httpx is the browser here
    for token in (site.tokens.view, site.tokens.control):
        assert token not in said + out.out + out.err
    assert site.tokens.view not in repr(site.tokens)


def test_tokens_are_for_their_owner_alone_and_are_found_again(tmp_path):
    before = os.umask(0)
    try:
        tokens = Tokens.create()
        auth.write_access(tmp_path / "dashboard", "http://127.0.0.1:8470", tokens)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "dashboard").stat().st_mode) == 0o700
    files = sorted((tmp_path / "dashboard").iterdir())
    assert [file.name for file in files] == ["control_token", "url", "view_token"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert auth.read_access(tmp_path / "dashboard") == ("http://127.0.0.1:8470", tokens)
    assert len({tokens.view, tokens.control, Tokens.create().view}) == 3
    assert min(len(tokens.view), len(tokens.control)) >= 43, "256 bits"


def test_tokens_that_were_emptied_open_nothing():
    gate = Gate(Tokens(view="", control=""), "made")
    for headers in ({}, {"authorization": "Bearer "}, {"cookie": f"{gate.cookie}="}):
        assert not gate.may_view(headers) and not gate.may_control(headers)


def test_a_folder_without_a_link_says_why(tmp_path):
    with pytest.raises(NoLink, match="no driver serves a dashboard of this run now"):
        auth.read_access(tmp_path / "dashboard")


@pytest.mark.parametrize(
    "cookie", ["", "=", "tandem_made", "a=b; tandem_made", "\x00;;=", "tandem_made=\u00e9"]
)
def test_a_cookie_that_makes_no_sense_opens_nothing(cookie):
    assert not Gate(Tokens.create(), "made").may_view({"cookie": cookie})


@pytest.mark.parametrize(
    "other", ["", 'a={"x":1}; ', "a=b c; ", "x@y=1; ", "theme=\u00fc; ", "=; ;; "]
)
def test_a_cookie_of_another_server_on_this_host_does_not_lock_out(other):
    gate = Gate(Tokens(view="v" * 43, control="c" * 43), "made")
    for cookie in (f"{other}{gate.cookie}={'v' * 43}", f"{gate.cookie}={'v' * 43}; {other}"):
        assert gate.may_view({"cookie": cookie}), cookie


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "bearer \u00e9", "Bearer a b"])
def test_an_authorization_that_makes_no_sense_opens_nothing(header):
    gate = Gate(Tokens.create(), "made")
    assert not gate.may_view({"authorization": header})
    assert not gate.may_control({"authorization": header})
