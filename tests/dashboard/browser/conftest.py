"""One browser for all tests of a worker, one page that is emptied for each of them, and one server
for each kind of run."""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.made_run.made_run import make_run
from tests.chromium import Watched, chromium, why_missing
from tests.dashboard.browser.page_server import Served

KINDS: dict[str, dict[str, Any]] = {
    "finished": {"steps": 40, "workers": 2},
    "stale": {"steps": 30, "workers": 1, "max_staleness": 1},
    "grown": {"steps": 60, "workers": 1, "workers_to": 3},
    "failed": {"steps": 12, "state": "failed"},
    "nonfinite": {"steps": 40, "nonfinite": True},
    "hostile": {"steps": 12, "hostile": True, "state": "failed"},
    "long": {"steps": 4000, "workers": 8, "samples_per_step": 1},
}


@pytest.fixture(scope="package")
def browser():
    """Is closed after the last test of this folder, which is a package for that reason: other tests
    call asyncio.run, which does not work while Playwright is there."""
    if why := why_missing():
        pytest.skip(why)
    with chromium() as started:
        yield started


@pytest.fixture(scope="package")
def made(tmp_path_factory) -> Callable[[str], pathlib.Path]:
    """The folder of a made-up run by its kind, written once."""
    folders: dict[str, pathlib.Path] = {}

    def of(kind: str) -> pathlib.Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("made") / kind
            make_run(folders[kind], **KINDS[kind])
        return folders[kind]

    return of


@pytest.fixture(scope="package")
def served(made) -> Iterator[Callable[[str], Served]]:
    """The server of a made-up run by its kind, started once."""
    servers: dict[str, Served] = {}

    def of(kind: str) -> Served:
        if kind not in servers:
            servers[kind] = Served("--run", str(made(kind)))
        return servers[kind]

    yield of
    for server in servers.values():
        server.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts servers that end with the test, after its pages."""
    servers: list[Served] = []

    def started(*arguments: object) -> Served:
        servers.append(Served(*map(str, arguments)))
        return servers[-1]

    yield started
    for server in servers:
        server.stop()


@pytest.fixture(scope="package")
def emptied(browser) -> Watched:
    """The page of all tests, since a new one costs three times what it shows; see `watch`."""
    return Watched(browser)


@pytest.fixture
def watch(emptied, serve) -> Iterator[Callable[..., Watched]]:
    """Opens the page; the test fails if the browser found a fault in it.

    A test finds it as a new one: without cookie, store, route or anything asked for."""
    page, media = emptied.page, {"color_scheme": "light", "reduced_motion": "no-preference"}
    page.emulate_media(**media)

    def opened(server: Served | None = None, view: str = "", **changed: str) -> Watched:
        page.emulate_media(**{**media, **changed})
        if server is not None:
            server.open(page, view)
        return emptied

    yield opened
    if page.url.startswith("http"):
        page.evaluate("localStorage.clear(), sessionStorage.clear()")
    page.goto("about:blank")
    page.unroute_all()
    page.mouse.move(0, 0)
    emptied.context.clear_cookies()
    try:
        emptied.check()
    finally:
        emptied.forget()


@pytest.fixture
def lines(made) -> Callable[[str, str], list[dict[str, Any]]]:
    """The records of one JSONL file of a made-up run: `lines("finished", "metrics")`."""

    def of(kind: str, name: str) -> list[dict[str, Any]]:
        text = (made(kind) / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    return of
