"""The HTTP side of the dashboard as a Starlette application.

Every answer is strict JSON or a file of the page, except the text for Prometheus and the event
stream. Handlers decode a request and delegate; they are the only place that knows status codes.
"""

import contextlib
import dataclasses
import json
import pathlib
import types
from collections.abc import Callable
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

from dashboard.auth import Gate, Tokens
from dashboard.guard import SECURITY_HEADERS, AccessGuard
from dashboard.openapi import Endpoint, document
from dashboard.prometheus import CONTENT_TYPE
from dashboard.query import BadQuery, choice, flag, names, number, read_query, text, whole
from dashboard.runs.driver_client import DriverClient, Refusal
from dashboard.runs.run_follower import RunFollower, step_json
from dashboard.stream import EventStream, TooManyViewers
from diagnosis.catalog import catalog
from diagnosis.judgement.history import history
from diagnosis.records.samples_index import MOST_LISTED, SampleQuery
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
    routes = [
        Route(one.path, types.MethodType(one.handler, api), methods=[one.method])
        for one in ENDPOINTS
    ]

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


RANGE = (
    whole("first", "First step; absent: the first of the run."),
    whole("last", "Last step, included; absent: the last of the run."),
)
POINTS = whole("points", "Maximum number of bins.", least=10, most=5000, default=600)
HISTORY = (
    *RANGE,
    POINTS,
    names("names", "Metrics, separated by commas; absent: those charted."),
)
TIMELINE = (
    *RANGE,
    number("last_s", "The last seconds instead of a range of steps.", above=0, most=86_400),
)
SAMPLES = (
    text("q", "Text in question, prompt, completion or answer, ignoring case.", default=""),
    choice("kind", "Of training or of evaluation; absent: both.", "train", "eval"),
    whole("first", "First step."),
    whole("last", "Last step, included."),
    whole("prompt", "prompt_id."),
    number("reward_min", "Least total reward."),
    number("reward_max", "Greatest total reward."),
    text("finish", "Finish reason, such as stop or length."),
    text("why", "Why it was kept."),
    flag("disagree", "1: strict and lenient parser disagree."),
    flag("error", "1: a reward function failed."),
    whole("offset", "Number of the newest to skip.", default=0),
    whole("limit", "Maximum number to list.", least=1, most=MOST_LISTED, default=50),
)


class Api:
    """The handlers; each docstring is the summary in the OpenAPI document."""

    def __init__(self, follower: RunFollower, compared: RunFollower | None):
        self._follower = follower
        self._compared = compared

    async def page(self, request: Request) -> Response:
        """The page; with ?token= it sets the cookie and redirects."""
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def healthz(self, request: Request) -> Response:
        """Whether this process answers."""
        return Json({"ok": True})

    async def openapi(self, request: Request) -> Response:
        """This document."""
        return Json(DOCUMENT)

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
        query = read_query(request.query_params, HISTORY)
        return Json(await self._read_or_refuse(history, self._follower.log, **query))

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
        query = read_query(request.query_params, TIMELINE)
        return Json(await self._read_or_refuse(self._follower.timeline.timeline, **query))

    async def trace(self, request: Request) -> Response:
        """The timeline as a trace for Perfetto or chrome://tracing."""
        query = read_query(request.query_params, RANGE)
        found = await self._read_or_refuse(self._follower.timeline.trace, **query)
        name = "-".join(["trace", *(str(step) for step in query.values() if step is not None)])
        return Json(found, headers={"content-disposition": f'attachment; filename="{name}.json"'})

    async def samples(self, request: Request) -> Response:
        """Completions, the newest first."""
        try:
            query = SampleQuery(**read_query(request.query_params, SAMPLES))
        except ValueError as error:
            raise BadQuery(str(error)) from error
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
        query = read_query(request.query_params, (*RANGE, POINTS))
        compare = self._follower.compare_with
        return Json(await self._read_or_refuse(compare, self._compared, **query))

    async def stream(self, request: Request) -> Any:
        """Server-sent events.

        `id` counts up; `data` is JSON: `run` as /api/run, `step` as /api/step/N with counts instead
        of ids, `fleet`, `judgement`, `timeline` {step}, `samples` {total}, and `reload` {} if the
        history has changed. A new viewer receives `run`, `fleet` and `judgement` at once. A comment
        comes every 10 s. A reader that falls 32 events behind is disconnected, and may reconnect.
        """
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
        """A file of the page."""
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


_CHANGE_ERRORS = (403, 404, 409, 422, 503, 504)
_TARGET = ("target", {"type": "integer", "minimum": 0})
ENDPOINTS = (
    Endpoint("/", Api.page, "text/html", (text("token", "View token, once."),)),
    Endpoint("/healthz", Api.healthz, "Health", is_open=True),
    Endpoint("/openapi.json", Api.openapi, ""),
    Endpoint("/metrics", Api.metrics, "text/plain"),
    Endpoint("/api/run", Api.run, "Run"),
    Endpoint("/api/catalog", Api.catalog, "Catalog"),
    Endpoint("/api/history", Api.history, "History", HISTORY, (422,)),
    Endpoint("/api/step/{step}", Api.step, "Step", errors=(404,)),
    Endpoint("/api/timeline", Api.timeline, "Timeline", TIMELINE, (422,)),
    Endpoint("/api/trace", Api.trace, "Trace", RANGE, (422,)),
    Endpoint("/api/samples", Api.samples, "Samples", SAMPLES, (422,)),
    Endpoint("/api/samples/{id}", Api.sample, "SampleWhole", errors=(404,)),
    Endpoint("/api/samples/{id}/same", Api.same_prompt, "SamplesSame", errors=(404,)),
    Endpoint("/api/judgement", Api.judgement, "Judgement"),
    Endpoint("/api/fleet", Api.fleet, "Fleet"),
    Endpoint("/api/fleet", Api.scale, "Accepted", errors=_CHANGE_ERRORS, body=_TARGET),
    Endpoint(
        *("/api/fleet/drain", Api.drain, "Accepted"),
        errors=_CHANGE_ERRORS,
        body=("name", {"type": "string"}),
    ),
    Endpoint("/api/compare", Api.compare, "Compare", (*RANGE, POINTS), (404, 422)),
    Endpoint("/api/stream", Api.stream, "text/event-stream", errors=(503,)),
)
"""Everything except the static files."""
DOCUMENT = document(
    [*ENDPOINTS, Endpoint("/static/{path}", _Static.get_response, "*/*", errors=(404,))]
)


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
