"""The two tokens of a dashboard, and where they are stored.

The view token grants GET requests, the control token POST requests as well. Both are stored in a
folder of mode 0700, in files of mode 0600, and never in a log, command line or archive.
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
    """The folder has no link to a dashboard; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one dashboard."""

    view: str = dataclasses.field(repr=False)
    control: str = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> "Tokens":
        """New random tokens."""
        return cls(
            view=secrets.token_urlsafe(TOKEN_BYTES), control=secrets.token_urlsafe(TOKEN_BYTES)
        )


def write_access(folder: pathlib.Path, url: str, tokens: Tokens) -> None:
    """Writes `url`, `view_token` and `control_token` to a private folder, which is replaced.

    See `replace_private`.
    """
    texts = {"url": url, "view_token": tokens.view, "control_token": tokens.control}
    replace_private(folder, {name: text.encode() for name, text in texts.items()})


def read_access(folder: pathlib.Path) -> tuple[str, Tokens]:
    """URL and tokens that `write_access` wrote.

    Raises:
        NoLink: if they do not exist or are not readable for this user.
    """
    try:
        url, view, control = (
            (folder / name).read_text().strip() for name in ("url", "view_token", "control_token")
        )
    except FileNotFoundError as error:
        raise NoLink(
            f"{folder} does not exist: no driver serves a dashboard of this run now (the run has "
            "ended or is still starting, or log.dashboard.enabled is false); "
            f"`python -m dashboard --run {folder.parent}` without --link serves one"
        ) from error
    except PermissionError as error:
        raise NoLink(
            f"{folder} belongs to another user: ask the owner of the run for the link"
        ) from error
    return url, Tokens(view=view, control=control)


def link(url: str, tokens: Tokens) -> str:
    """The URL to open in a browser; it contains the view token."""
    return f"{url}/?token={tokens.view}"


def _cookie_name(served: str) -> str:
    """A name for one dashboard: cookies ignore ports, and a host may have several dashboards."""
    return f"tandem_{_NOT_OF_A_COOKIE.sub('_', served)[:100]}"


class Gate:
    """Compares the credentials of a request with the tokens, in constant time."""

    def __init__(self, tokens: Tokens, served: str):
        self._tokens = tokens
        self.cookie = _cookie_name(served)

    def may_view(self, headers: Mapping[str, str]) -> bool:
        """Whether a bearer token or the cookie grants access to pages."""
        shown = [_bearer(headers), _cookie(headers, self.cookie)]
        return any(self.is_view(one) or self._is_control(one) for one in shown)

    def may_control(self, headers: Mapping[str, str]) -> bool:
        """Whether the bearer token is the control token; a cookie is not enough."""
        return self._is_control(_bearer(headers))

    def is_view(self, token: str) -> bool:
        """Whether this is the view token."""
        return _matches(token, self._tokens.view)

    def _is_control(self, token: str) -> bool:
        return _matches(token, self._tokens.control)


def _matches(shown: str, token: str) -> bool:
    """Whether both are equal and not empty, as after a token file was emptied."""
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _cookie(headers: Mapping[str, str], name: str) -> str:
    """The value of a cookie, or "".

    http.cookies drops all cookies if one is malformed, perhaps one of another server on this host.
    """
    pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")
