"""Who may look and who may command: the two tokens of a dashboard, and where they are kept.

The view token opens every page, the control token opens POSTs as well. Both lie in a folder of
mode 0700, in files of mode 0600, and nowhere else: no log, command line or archive holds them.
"""

import dataclasses
import hmac
import pathlib
import re
import secrets
from collections.abc import Mapping

from services.wire.private_folder import replace_private

FOLDER = "dashboard"
"""In the run's folder, while its driver serves a dashboard."""
TOKEN_BYTES = 32
_NOT_OF_A_COOKIE = re.compile(r"[^A-Za-z0-9_-]")


class NoLink(RuntimeError):
    """The folder holds no link to a dashboard; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """What opens one dashboard."""

    view: str = dataclasses.field(repr=False)
    control: str = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> "Tokens":
        return cls(
            view=secrets.token_urlsafe(TOKEN_BYTES), control=secrets.token_urlsafe(TOKEN_BYTES)
        )


def write_access(folder: pathlib.Path, url: str, tokens: Tokens) -> None:
    """Leaves `url`, `view_token` and `control_token` in a folder that only its owner may read, in
    place of what is there; see `replace_private`.
    """
    texts = {"url": url, "view_token": tokens.view, "control_token": tokens.control}
    replace_private(folder, {name: text.encode() for name, text in texts.items()})


def read_access(folder: pathlib.Path) -> tuple[str, Tokens]:
    """URL and tokens that `write_access` left.

    Raises:
        NoLink: if they are not there or not for this user.
    """
    try:
        url, view, control = (
            (folder / name).read_text().strip() for name in ("url", "view_token", "control_token")
        )
    except FileNotFoundError as error:
        raise NoLink(
            f"{folder} is not there: no driver serves a dashboard of this run now (it has ended, "
            "has not got so far, or log.dashboard.enabled is false); `python -m dashboard "
            f"--run {folder.parent}` without --link serves one"
        ) from error
    except PermissionError as error:
        raise NoLink(
            f"{folder} belongs to another user: ask whoever started the run for the link"
        ) from error
    return url, Tokens(view=view, control=control)


def link(url: str, tokens: Tokens) -> str:
    """What a browser is to open; it holds the view token."""
    return f"{url}/?token={tokens.view}"


def cookie_name(served: str) -> str:
    """Of what is served: cookies do not know ports, and a host may have several dashboards."""
    return f"tandem_{_NOT_OF_A_COOKIE.sub('_', served)[:100]}"


class Gate:
    """Compares what a request shows with the tokens, in constant time."""

    def __init__(self, tokens: Tokens, served: str):
        self._tokens = tokens
        self.cookie = cookie_name(served)

    def may_look(self, headers: Mapping[str, str]) -> bool:
        """Whether a bearer token or the cookie opens the pages."""
        shown = [_bearer(headers), _cookie(headers, self.cookie)]
        return any(self.is_view(one) or self._is_control(one) for one in shown)

    def may_command(self, headers: Mapping[str, str]) -> bool:
        """Whether the bearer token is that of control; a cookie is never enough."""
        return self._is_control(_bearer(headers))

    def is_view(self, token: str) -> bool:
        return _opens(token, self._tokens.view)

    def _is_control(self, token: str) -> bool:
        return _opens(token, self._tokens.control)


def _opens(shown: str, token: str) -> bool:
    """Whether they are the same; a token of a file that was emptied opens nothing."""
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _cookie(headers: Mapping[str, str], name: str) -> str:
    """By hand: http.cookies gives up all of them where another server on this host, whose cookies
    come too, has set one that is not quite right.
    """
    pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")
