"""The HTTP side of the dashboard as a Starlette application; `openapi.py` describes it.

Every answer is strict JSON or a file of the page, except the text for Prometheus and the event
stream. Handlers decode a request and delegate; they are the only place that knows status codes.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from dashboard import openapi
from dashboard.auth import Gate, Tokens
from dashboard.guard import SECURITY_HEADERS, AccessGuard
from dashboard.prometheus import CONTENT_TYPE
from dashboard.query import BadQuery, Query, sample_query
from dashboard.runs.driver_client import DriverClient, Refusal
from dashboard.runs.run_follower import RunFollower, step_json
from dashboard.stream import EventStream, TooManyViewers
from diagnosis.catalog import catalog
from diagnosis.judgement.history import history
from services.control.messages import Accepted
from services.wire.strict_json import encode

STATIC = pathlib.Path(__file__).parent / "static"
GZIP_FROM_BYTES = 1400
"""A shorter answer fits into one packet."""
BODY_BYTES = 4096
"""Longest body of a POST."""


class Json(Response):
    """Strict JSON."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None):
        headers = {"cache-control": "no-store", **(headers or {})}
        super().__init__(encode(content), status_code, headers)


def build(
    follower: RunFollower,
    tokens: Tokens,
    *,
    loopback: bool,
    cookie: str,
    compared: RunFollower | None = None,
) -> Starlette:
    """The application over one run, or over two.

    Args:
        follower: of the first run; it polls the run while the application runs.
        tokens: grant access.
        loopback: whether it is served on loopback, where other host names are refused.
        cookie: the name of its cookie is made from this.
        compared: the second run.
    """
    follower.compares = compared is not None
    if compared is not None:
        compared.compares = True
    api = Api(follower, compared)
    gate = Gate(tokens, cookie)
    routes = [Route(path, handler, methods=[method]) for path, method, handler in api.routes()]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        async with follower.following():
            yield

    return Starlette(
        routes=[*routes, Mount("/static", _Static(directory=STATIC))],
        middleware=[
            Middleware(AccessGuard, gate=gate, loopback=loopback),
            Middleware(_gzip),
        ],
        exception_handlers={HTTPException: _http_error, BadQuery: _bad_query, 500: _failure},
        lifespan=lifespan,
    )


class Api:
    """The handlers; each docstring is the summary in the OpenAPI document."""

    def __init__(self, follower: RunFollower, compared: RunFollower | None):
        self._follower = follower
        self._compared = compared

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Any]]]]:
        """Path, method and handler of everything except the static files."""
        return [
            ("/", "GET", self.page),
            ("/healthz", "GET", self.healthz),
            ("/openapi.json", "GET", self.openapi),
            ("/metrics", "GET", self.metrics),
            ("/api/run", "GET", self.run),
            ("/api/catalog", "GET", self.catalog),
            ("/api/history", "GET", self.history),
            ("/api/step/{step}", "GET", self.step),
            ("/api/timeline", "GET", self.timeline),
            ("/api/trace", "GET", self.trace),
            ("/api/samples", "GET", self.samples),
            ("/api/samples/{id}", "GET", self.sample),
            ("/api/samples/{id}/same", "GET", self.same_prompt),
            ("/api/judgement", "GET", self.judgement),
            ("/api/fleet", "GET", self.fleet),
            ("/api/fleet", "POST", self.scale),
            ("/api/fleet/drain", "POST", self.drain),
            ("/api/compare", "GET", self.compare),
            ("/api/stream", "GET", self.stream),
        ]

    async def page(self, request: Request) -> Response:
        """The page; with ?token= it sets the cookie and redirects."""
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def healthz(self, request: Request) -> Response:
        """Whether this process answers."""
        return Json({"ok": True})

    async def openapi(self, request: Request) -> Response:
        """This document."""
        return Json(openapi.DOCUMENT)

    async def metrics(self, request: Request) -> Response:
        """Every number of the run, for Prometheus."""
        fleet, hub = await self._follower.fleet(), self._follower.hub
        text = await self._follower.read(
            lambda: self._follower.exporter.text(
                self._follower.run(), fleet, viewers=hub.viewers, dropped=hub.dropped
            )
        )
        return Response(text, media_type=CONTENT_TYPE)

    async def run(self, request: Request) -> Response:
        """The run and its configuration."""
        return Json(await self._follower.read(self._follower.run))

    async def catalog(self, request: Request) -> Response:
        """The meaning of metrics and phases."""
        return Json(catalog.catalog_json())

    async def history(self, request: Request) -> Response:
        """Metrics, phases and critical path over steps, binned."""
        query = Query(request.query_params, "first", "last", "points", "names")
        return Json(
            await self._read_or_refuse(
                history,
                self._follower.log,
                first=query.whole("first"),
                last=query.whole("last"),
                points=query.whole("points", least=10, most=5000) or 600,
                names=query.names("names"),
            )
        )

    async def step(self, request: Request) -> Response:
        """One closed step."""
        text = request.path_params["step"]
        if not text.isdecimal() or len(text) > 12:
            return _error(404, f"{text[:40]!r} is not a step: give a whole number from 0")
        found = await self._follower.read(self._find_step, int(text))
        if found is None:
            last = self._follower.log.last_step
            return _error(404, f"step {text} has not closed: the log has steps up to {last}")
        return Json(found)

    async def timeline(self, request: Request) -> Response:
        """Spans of every process."""
        query = Query(request.query_params, "first", "last", "last_s")
        first, last = query.whole("first"), query.whole("last")
        last_s = query.number("last_s", above=0, most=86_400)
        read = self._follower.timeline.timeline
        return Json(await self._read_or_refuse(read, first=first, last=last, last_s=last_s))

    async def trace(self, request: Request) -> Response:
        """The timeline as a trace for Perfetto or chrome://tracing."""
        query = Query(request.query_params, "first", "last")
        first, last = query.whole("first"), query.whole("last")
        found = await self._read_or_refuse(self._follower.timeline.trace, first=first, last=last)
        name = "-".join(["trace", *(str(step) for step in (first, last) if step is not None)])
        return Json(found, headers={"content-disposition": f'attachment; filename="{name}.json"'})

    async def samples(self, request: Request) -> Response:
        """Completions, the newest first."""
        query = sample_query(request.query_params)
        return Json(await self._follower.read(self._follower.samples.search, query))

    async def sample(self, request: Request) -> Response:
        """One completion with its tokens."""
        return await self._of_sample(request, self._follower.samples.sample)

    async def same_prompt(self, request: Request) -> Response:
        """Completions of the same prompt over time, the oldest first."""
        return await self._of_sample(request, self._follower.samples.same_prompt)

    async def judgement(self, request: Request) -> Response:
        """Findings about the run, in words and numbers."""
        return Json(await self._follower.read(self._follower.judgement))

    async def fleet(self, request: Request) -> Response:
        """The rollout workers."""
        return Json(await self._follower.fleet())

    async def scale(self, request: Request) -> Response:
        """Requests a number of rollout workers."""
        wanted = await _body(request, "target", int)
        if not 0 <= wanted < 2**31:
            raise BadQuery(f"target={wanted} is not a number of workers: give 1, 2, 3, ...")
        return await self._change(lambda link: link.scale(wanted))

    async def drain(self, request: Request) -> Response:
        """Requests that a rollout worker is drained."""
        wanted = await _body(request, "name", str)
        if not wanted.isprintable():  # nor can gRPC carry a lone surrogate
            raise BadQuery(
                f"name={wanted[:40]!r} is not a worker: give a name that /api/fleet lists"
            )
        return await self._change(lambda link: link.drain(wanted))

    async def compare(self, request: Request) -> Response:
        """Two runs side by side, if two are served."""
        if self._compared is None:
            return _error(
                404, "only one run is shown: compare two with python -m dashboard --compare A B"
            )
        query = Query(request.query_params, "first", "last", "points")
        points = query.whole("points", least=10, most=5000) or 600
        first, last = query.whole("first"), query.whole("last")
        compare = self._follower.compare_with
        return Json(await self._read_or_refuse(compare, self._compared, first, last, points))

    async def stream(self, request: Request) -> Any:
        """Server-sent events."""
        if request.method == "HEAD":  # the route accepts it too, and it ends at once
            return Response(media_type="text/event-stream")
        try:
            return EventStream(self._follower.hub, await self._follower.join())
        except TooManyViewers as error:
            return _error(503, str(error))

    async def _read_or_refuse(
        self, function: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        """As `RunFollower.read`, for a function that raises ValueError for bad parameters."""
        try:
            return await self._follower.read(function, *arguments, **named)
        except ValueError as error:
            raise BadQuery(str(error)) from error

    def _find_step(self, step: int) -> dict[str, Any] | None:
        facts = self._follower.log.step(step)
        return facts and step_json(facts, self._follower.log.groups(step))

    async def _of_sample(self, request: Request, find: Callable[[str], Any]) -> Response:
        name = request.path_params["id"]
        found = await self._follower.read(find, name)
        if found is None:
            return _error(
                404, f"there is no sample {name[:40]!r}: give an id that /api/samples lists"
            )
        return Json(found)

    async def _change(self, call: Callable[[DriverClient], Accepted]) -> Response:
        if not (await self._follower.read(self._follower.run))["live"]:
            return _error(409, "the run has ended: it has no workers")
        try:
            return Json(dataclasses.asdict(await self._follower.change_fleet(call)))
        except Refusal as refusal:
            return _error(refusal.status, str(refusal))


class _Static(StaticFiles):
    """The page's files; a browser asks at every load whether they changed."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


def _gzip(app: ASGIApp) -> ASGIApp:
    return GZipMiddleware(app, minimum_size=GZIP_FROM_BYTES, compresslevel=5)


async def _body(request: Request, key: str, kind: type) -> Any:
    """The one value of a small JSON object."""
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_BYTES:
            raise BadQuery(f"the body is longer than {BODY_BYTES} bytes: send {{{key!r}: ...}}")
    try:
        found = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise BadQuery(f"the body is not JSON ({error}): send an object with {key!r}") from error
    if not isinstance(found, dict) or set(found) != {key} or type(found[key]) is not kind:
        expected = "a whole number" if kind is int else "a text"
        raise BadQuery(f"the body must be a JSON object with {key!r} alone, {expected}")
    return found[key]


def _error(status: int, text: str) -> Json:
    return Json({"error": text}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {
        404: f"there is no {request.url.path[:100]}: /openapi.json lists all paths",
        405: f"{request.method} is not allowed for {request.url.path[:100]}: see /openapi.json",
    }.get(error.status_code, error.detail)
    return Json({"error": text}, error.status_code, dict(error.headers or {}))


async def _bad_query(request: Request, error: Exception) -> Response:
    return _error(422, str(error))


async def _failure(request: Request, error: Exception) -> Response:
    text = f"internal error of the dashboard ({type(error).__name__}): see dashboard.log"
    return Json({"error": text}, 500, SECURITY_HEADERS)  # it does not pass the guard
