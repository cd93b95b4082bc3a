"""The HTTP side of the dashboard as a Starlette application; `openapi.py` describes it.

Every answer is strict JSON or a file of the page, but for the text of Prometheus and the event
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
from dashboard.guard import SECURITY_HEADERS, Guard
from dashboard.prometheus import CONTENT_TYPE
from dashboard.query import BadQuery, Query, sample_query
from dashboard.runs.fleet_link import FleetLink, Refusal
from dashboard.runs.live import Live, step_json
from dashboard.stream import EventStream, TooManyViewers
from diagnosis.catalog import catalog
from diagnosis.judgement.history import history
from services.control.messages import Accepted
from services.wire.strict_json import encode

STATIC = pathlib.Path(__file__).parent / "static"
GZIP_FROM_BYTES = 1400
"""A shorter answer fits into one packet anyway."""
BODY_BYTES = 4096
"""Longest body of a POST."""

Compare = Callable[[int | None, int | None, int], dict[str, Any]]
"""From first step, last step and points to the document of /api/compare."""


class Json(Response):
    """Strict JSON."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None):
        headers = {"cache-control": "no-store", **(headers or {})}
        super().__init__(encode(content), status_code, headers)


def build(
    live: Live,
    tokens: Tokens,
    *,
    loopback: bool,
    cookie: str,
    compare: Compare | None = None,
) -> Starlette:
    """The application over one run, or over two of which `live` is the first.

    Args:
        live: is kept up to date for as long as the application runs.
        tokens: that open it.
        loopback: whether it is served on loopback, where other host names are refused.
        cookie: what its cookie is named after.
        compare: makes the document of /api/compare.
    """
    live.compares = compare is not None
    api = Api(live, compare)
    gate = Gate(tokens, cookie)
    routes = [Route(path, handler, methods=[method]) for path, method, handler in api.routes()]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        async with live.kept_up():
            yield

    return Starlette(
        routes=[*routes, Mount("/static", _Static(directory=STATIC))],
        middleware=[
            Middleware(Guard, gate=gate, loopback=loopback),
            Middleware(_gzip),
        ],
        exception_handlers={HTTPException: _http_error, BadQuery: _bad_query, 500: _failure},
        lifespan=lifespan,
    )


class Api:
    """The handlers, over one run."""

    def __init__(self, live: Live, compare: Compare | None):
        self._live = live
        self._compare = compare

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Any]]]]:
        """Path, method and handler of everything but the static files."""
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
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def healthz(self, request: Request) -> Response:
        return Json({"ok": True})

    async def openapi(self, request: Request) -> Response:
        return Json(openapi.DOCUMENT)

    async def metrics(self, request: Request) -> Response:
        fleet, hub = await self._live.fleet(), self._live.hub
        text = await self._live.read(
            lambda: self._live.exporter.text(
                self._live.run(), fleet, viewers=hub.viewers, dropped=hub.dropped
            )
        )
        return Response(text, media_type=CONTENT_TYPE)

    async def run(self, request: Request) -> Response:
        return Json(await self._live.read(self._live.run))

    async def catalog(self, request: Request) -> Response:
        return Json(catalog.catalog_json())

    async def history(self, request: Request) -> Response:
        query = Query(request.query_params, "first", "last", "points", "names")
        return Json(
            await self._asked(
                history,
                self._live.log,
                first=query.whole("first"),
                last=query.whole("last"),
                points=query.whole("points", least=10, most=5000) or 600,
                names=query.names("names"),
            )
        )

    async def step(self, request: Request) -> Response:
        text = request.path_params["step"]
        if not text.isdecimal() or len(text) > 12:
            return _error(404, f"step {text[:40]!r} is no step: give a whole number from 0")
        found = await self._live.read(self._find_step, int(text))
        if found is None:
            last = self._live.log.last_step
            return _error(404, f"step {text} is not closed: the log has steps up to {last}")
        return Json(found)

    async def timeline(self, request: Request) -> Response:
        query = Query(request.query_params, "first", "last", "last_s")
        first, last = query.whole("first"), query.whole("last")
        last_s = query.number("last_s", above=0, most=86_400)
        spans = self._live.spans
        return Json(await self._asked(spans.timeline, first=first, last=last, last_s=last_s))

    async def trace(self, request: Request) -> Response:
        query = Query(request.query_params, "first", "last")
        first, last = query.whole("first"), query.whole("last")
        found = await self._asked(self._live.spans.trace, first=first, last=last)
        name = "-".join(["trace", *(str(step) for step in (first, last) if step is not None)])
        return Json(found, headers={"content-disposition": f'attachment; filename="{name}.json"'})

    async def samples(self, request: Request) -> Response:
        query = sample_query(request.query_params)
        return Json(await self._live.read(self._live.samples.search, query))

    async def sample(self, request: Request) -> Response:
        return await self._of_sample(request, self._live.samples.sample)

    async def same_prompt(self, request: Request) -> Response:
        return await self._of_sample(request, self._live.samples.same_prompt)

    async def judgement(self, request: Request) -> Response:
        return Json(await self._live.read(self._live.judgement))

    async def fleet(self, request: Request) -> Response:
        return Json(await self._live.fleet())

    async def scale(self, request: Request) -> Response:
        wish = await _body(request, "target", int)
        if not 0 <= wish < 2**31:
            raise BadQuery(f"target={wish} is no number of workers: give 1, 2, 3, ...")
        return await self._change(lambda link: link.scale(wish))

    async def drain(self, request: Request) -> Response:
        wish = await _body(request, "name", str)
        if not wish.isprintable():  # nor can gRPC carry a lone surrogate
            raise BadQuery(f"name={wish[:40]!r} is no worker: give a name that /api/fleet lists")
        return await self._change(lambda link: link.drain(wish))

    async def compare(self, request: Request) -> Response:
        if self._compare is None:
            return _error(
                404, "one run is shown: compare two with python -m dashboard --compare A B"
            )
        query = Query(request.query_params, "first", "last", "points")
        points = query.whole("points", least=10, most=5000) or 600
        first, last = query.whole("first"), query.whole("last")
        return Json(await self._asked(self._compare, first, last, points))

    async def stream(self, request: Request) -> Any:
        if request.method == "HEAD":  # which the route takes too, and which ends at once
            return Response(media_type="text/event-stream")
        try:
            return EventStream(self._live.hub, await self._live.join())
        except TooManyViewers as error:
            return _error(503, str(error))

    async def _asked(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """As `Live.read`, of a function that refuses what cannot be asked by ValueError."""
        try:
            return await self._live.read(function, *arguments, **named)
        except ValueError as error:
            raise BadQuery(str(error)) from error

    def _find_step(self, step: int) -> dict[str, Any] | None:
        facts = self._live.log.step(step)
        return facts and step_json(facts, self._live.log.groups(step))

    async def _of_sample(self, request: Request, find: Callable[[str], Any]) -> Response:
        name = request.path_params["id"]
        found = await self._live.read(find, name)
        if found is None:
            return _error(
                404, f"there is no sample {name[:40]!r}: ids are those that /api/samples lists"
            )
        return Json(found)

    async def _change(self, call: Callable[[FleetLink], Accepted]) -> Response:
        if not (await self._live.read(self._live.run))["live"]:
            return _error(409, "the run does not go on: its workers are gone")
        try:
            return Json(dataclasses.asdict(await self._live.change(call)))
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
        raise BadQuery(f"the body is no JSON ({error}): send an object with {key!r}") from error
    if not isinstance(found, dict) or set(found) != {key} or type(found[key]) is not kind:
        says = "a whole number" if kind is int else "a text"
        raise BadQuery(f"the body must be a JSON object with {key!r} alone, {says}")
    return found[key]


def _error(status: int, text: str) -> Json:
    return Json({"error": text}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {
        404: f"there is no {request.url.path[:100]}: /openapi.json lists what there is",
        405: f"{request.method} is not for {request.url.path[:100]}: /openapi.json says what is",
    }.get(error.status_code, error.detail)
    return Json({"error": text}, error.status_code, dict(error.headers or {}))


async def _bad_query(request: Request, error: Exception) -> Response:
    return _error(422, str(error))


async def _failure(request: Request, error: Exception) -> Response:
    text = f"the dashboard failed here ({type(error).__name__}): see dashboard.log"
    return Json({"error": text}, 500, SECURITY_HEADERS)  # the guard does not see it
