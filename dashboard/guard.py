"""Middleware in front of every route: tokens, origins, and security headers of answers."""

from collections.abc import MutableMapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.auth import Gate
from services.wire.strict_json import encode

OPEN_PATHS = ("/healthz",)
"""Paths that need no token."""

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}

_LOGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tandem: token needed</title></head><body>
<h1>This dashboard needs a token</h1>
<p>{why}</p>
<p>The owner of the run gets a link with the token from
<code>python -m dashboard --run DIR --link</code>, where DIR is the run's output folder.</p>
<form method="get" action="/"><label>Token <input name="token" type="password" autofocus
 autocomplete="off"></label> <button>Open</button></form>
</body></html>
"""
_ENTERED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={target}">
<title>Tandem</title></head><body><a href="{target}">Open the dashboard</a></body></html>
"""


class AccessGuard:
    """ASGI middleware; it only passes on requests with a valid token."""

    def __init__(self, app: ASGIApp, *, gate: Gate, loopback: bool):
        self._app = app
        self._gate = gate
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or passes on one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(scope) or self._entry(scope)
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """The refusal of a forbidden request; `_entry` handles a missing token."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._loopback and not _is_own_host(host):
            return _error(
                421,
                f"Host {host[:100]!r} is not a loopback address: open the dashboard as 127.0.0.1 "
                "or localhost, or serve it on another address with log.dashboard.host",
            )
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin")
            if origin is not None and _host_of(origin) != host:
                return _error(
                    403, f"Origin {origin[:100]!r} is another site: it may not make changes"
                )
            if not self._gate.may_control(headers):
                return _error(
                    401,
                    "the control token is missing or wrong: the owner of the run gets it from "
                    "python -m dashboard --run DIR --link (a program sends it as "
                    "`Authorization: Bearer ...`)",
                )
        return None

    def _entry(self, scope: Scope) -> Response | None:
        """The answer to a request with a token in the URL, or without any; None lets it pass."""
        if scope["path"] in OPEN_PATHS:
            return None
        shown = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if scope["method"] in ("GET", "HEAD") and "token" in shown:
            token = shown.pop("token")
            if not self._gate.is_view(token):
                return _locked(scope, "The token in the link is not the token of this run.")
            return self._entered(scope, token, shown)
        if self._gate.may_view(Headers(scope=scope)):
            return None
        return _locked(scope, "The request has no token, or not the token of this run.")

    def _entered(self, scope: Scope, token: str, left: MutableMapping[str, str]) -> Response:
        """Sets the cookie and redirects to the URL without the token."""
        # One slash only: `//host` would be another host.
        target = "/" + scope["path"].lstrip("/\\") + (f"?{urlencode(left)}" if left else "")
        if Headers(scope=scope).get("sec-fetch-site") == "cross-site":
            # A redirect would count as a request of the other site, without Strict cookies.
            target = "/"
            answer: Response = HTMLResponse(_ENTERED.format(target=target))
        else:
            answer = RedirectResponse(target, 303)
        answer.headers["cache-control"] = "no-store"
        answer.set_cookie(self._gate.cookie, token, httponly=True, samesite="strict", path="/")
        return answer


def _locked(scope: Scope, why: str) -> Response:
    if scope["path"] == "/":
        return HTMLResponse(_LOGIN.format(why=why), 401, {"cache-control": "no-store"})
    return _error(
        401,
        "the token is missing or wrong: send it as `Authorization: Bearer ...`; the owner of the "
        "run gets it from python -m dashboard --run DIR --link",
    )


def _error(status: int, text: str) -> Response:
    headers: dict[str, Any] = {"cache-control": "no-store"}
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="tandem"'
    return Response(encode({"error": text}), status, headers, media_type="application/json")


def _is_own_host(host: str) -> bool:
    """Whether a Host header is an IP address or localhost.

    Another name that resolves to loopback may be an attack by DNS rebinding.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""  # half an IPv6 address is a ValueError too
        if name != "localhost":
            ip_address(name)
    except ValueError:
        return False
    return True


def _host_of(origin: str) -> str:
    """Host and port of an Origin header; empty if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
