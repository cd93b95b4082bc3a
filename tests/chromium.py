"""A headless Chromium for tests of the dashboard's page, and a page that keeps what goes wrong."""

import contextlib
import importlib.util
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page

OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
LAPTOP = {"width": 1366, "height": 768}
_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`CSP: ${event.violatedDirective} forbids ${event.blockedURI} ${event.sample}`));
"""


def why_missing() -> str | None:
    """What a machine lacks to drive a page, with the way to get it; None if it lacks nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install '.[test]'"
    if shutil.which("chromium") is None:
        return "chromium is not installed: make chromium (as root)"
    return None


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser that stops when the block ends; asyncio.run does not work inside of it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=OPTIONS)
        yield browser
        browser.close()


class Watched:
    """One page in a context of its own, and every fault that the browser found in it.

    Args:
        browser: that has been started.
        context: options of the context, such as `color_scheme`.
    """

    def __init__(self, browser: "Browser", **context: Any):
        self._allowed: list[str] = []
        self.faults: list[str] = []
        """Console errors, uncaught errors, violations of the policy, dialogs."""
        self.requests: list[str] = []
        """URLs, in order."""
        self.context = browser.new_context(**{"viewport": LAPTOP, **context})
        self.context.add_init_script(_VIOLATIONS)
        self.page = self.context.new_page()
        self.page.set_default_timeout(HANG_S * 1e3)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        self.page.on("dialog", self._asked)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def allow(self, pattern: str) -> None:
        """Says that errors which match are meant to happen."""
        self._allowed.append(pattern)

    def check(self) -> None:
        """Raises AssertionError with everything that went wrong and was not allowed."""
        faults = [
            fault for fault in self.faults if not any(re.search(p, fault) for p in self._allowed)
        ]
        assert not faults, "\n".join(faults)
        hosts = {urlsplit(url).hostname for url in self.requests if url.startswith("http")}
        assert hosts <= {"127.0.0.1"}, f"the page asked other hosts: {hosts}"

    def forget(self) -> None:
        """What was allowed, found and asked for, so that another test may use the page."""
        for kept in (self._allowed, self.faults, self.requests):
            kept.clear()

    def _heard(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _asked(self, dialog: "Dialog") -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()


def open_view(page: "Page", view: str) -> None:
    """Shows a view, which may have parameters as `samples?step=7`, and waits until it has drawn."""
    page.evaluate("view => { location.hash = view }", view)
    page.locator(f"#view-{view.partition('?')[0]}").wait_for(state="visible")
    wait_until_drawn(page)


def wait_until_drawn(page: "Page") -> None:
    """Returns when the view that is shown says that it has drawn what it has."""
    page.locator("body[data-drawn=true]").wait_for()


def wait_until(page: "Page", condition: str) -> None:
    """Returns when a JavaScript expression holds; the page's policy forbids what
    `Page.wait_for_function` does."""
    wait_for(page, lambda: page.evaluate(condition), condition)


def wait_for(
    page: "Page", condition: Callable[[], object], what: str, timeout_s: float = HANG_S
) -> None:
    """Returns when a condition on a page holds; the page goes on meanwhile.

    Raises:
        AssertionError: naming what was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        page.wait_for_timeout(30)


def table_rows(page: "Page", selector: str) -> list[list[str]]:
    """The text of every cell of a table but its head; the selector may be of what holds it."""
    return page.locator(selector).first.evaluate(
        """node => [...(node.matches("table") ? node : node.querySelector("table")).rows]
            .filter(row => row.querySelector("td"))
            .map(row => [...row.cells].map(cell => cell.textContent.trim()))"""
    )
