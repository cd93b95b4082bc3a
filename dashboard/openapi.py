"""The HTTP side of the dashboard as an OpenAPI 3.1 document.

Schemas stand in `openapi_schemas.py`. The tests hold that every route of the application is in here
and that every answer they get has the form that is promised.
"""

from typing import Any

from dashboard.openapi_schemas import SCHEMAS

VERSION = "1"
"""Of the interface; it changes when something that machines read changes its meaning."""

Json = dict[str, Any]


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _query(name: str, about: str, kind: str = "integer", **schema: Any) -> Json:
    return {
        "name": name,
        "in": "query",
        "required": False,
        "description": about,
        "schema": {"type": kind, **schema},
    }


def _path(name: str, about: str, kind: str = "string") -> Json:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": about,
        "schema": {"type": kind},
    }


def _refusals(*statuses: int) -> Json:
    content = {"application/json": {"schema": _ref("Error")}}
    return {
        str(status): {"description": _MEANING[status], "content": content} for status in statuses
    }


_MEANING = {
    401: "No token, or a wrong one.",
    403: "Another site's page asked.",
    404: "There is none.",
    409: "The run cannot do that in the state it is in.",
    422: "A value that cannot be; the text names value, rule and fix.",
    503: "The driver cannot be reached, or too many watch.",
    504: "The driver did not answer in time.",
}


def _get(
    about: str, schema: str | None, *parameters: Json, errors: tuple[int, ...] = (), **more: Any
) -> Json:
    content = more.pop("content", None)
    if content is None:
        content = {"application/json": {"schema": _ref(schema) if schema else {}}}
    return {
        "summary": about,
        "parameters": list(parameters),
        "responses": {
            "200": {"description": about, "content": content},
            **(_refusals(401, *errors)),
        },
        **more,
    }


def _post(about: str, key: str, value: Json) -> Json:
    body = {
        "type": "object",
        "required": [key],
        "properties": {key: value},
        "additionalProperties": False,
    }
    return {
        "summary": about,
        "security": [{"control": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The driver has accepted; the change takes its time.",
                "content": {"application/json": {"schema": _ref("Accepted")}},
            },
            **_refusals(401, 403, 404, 409, 422, 503, 504),
        },
    }


def _text(kind: str, about: str) -> Json:
    return {"content": {kind: {"schema": {"type": "string", "description": about}}}}


_FIRST = _query("first", "First step; absent: the first of the run.", minimum=0)
_LAST = _query("last", "Last step, included; absent: the last of the run.", minimum=0)
_POINTS = _query("points", "Most bins of the answer.", minimum=10, maximum=5000, default=600)
_ID = _path("id", "As /api/samples lists it, such as t123.")

_SAMPLE_QUERY = (
    _query("q", "Text within question, completion or answer; case does not count.", "string"),
    _query("kind", "Of training or of evaluation; absent: both.", "string", enum=["train", "eval"]),
    _query("first", "First step.", minimum=0),
    _query("last", "Last step, included.", minimum=0),
    _query("prompt", "prompt_id.", minimum=0),
    _query("reward_min", "Least total reward.", "number"),
    _query("reward_max", "Greatest total reward.", "number"),
    _query("finish", "Finish reason, such as stop or length.", "string"),
    _query("why", "Why it was kept.", "string"),
    _query("disagree", "1: strict and lenient parser differ.", "string", enum=["0", "1"]),
    _query("error", "1: a reward function failed.", "string", enum=["0", "1"]),
    _query("offset", "How many of the newest to leave out.", minimum=0, default=0),
    _query("limit", "How many to list.", minimum=1, maximum=500, default=50),
)

_STREAM = """Server-sent events. `id` counts up; `data` is JSON:
`run` as /api/run, `step` as /api/step/N with counts in place of ids, `fleet`, `judgement`,
`timeline` {step}, `samples` {total}, and `reload` {} where history has changed. A new viewer gets
`run`, `fleet` and `judgement` at once. A comment comes every 10 s. A reader that falls 32 events
behind is cut off, and may come back."""

DOCUMENT: Json = {
    "openapi": "3.1.0",
    "info": {
        "title": "Tandem dashboard",
        "version": VERSION,
        "description": "What a run does, where its time goes, and the way to change its workers. "
        'A number that is not finite is the text "NaN", "Infinity" or "-Infinity".',
    },
    "security": [{"view": []}, {"cookie": []}],
    "paths": {
        "/": {
            "get": _get(
                "The page; with ?token= it sets the cookie and redirects.",
                None,
                _query("token", "View token, once.", "string"),
                **_text("text/html", "HTML"),
            )
        },
        "/static/{path}": {
            "get": _get(
                "A file of the page.",
                None,
                _path("path", "Name of the file."),
                errors=(404,),
                **_text("*/*", "as its name says"),
            )
        },
        "/healthz": {"get": {**_get("Whether this process answers.", "Health"), "security": []}},
        "/openapi.json": {"get": _get("This document.", None)},
        "/metrics": {
            "get": _get(
                "Every number of the run for Prometheus.",
                None,
                **_text("text/plain", "Text format 0.0.4"),
            )
        },
        "/api/run": {"get": _get("The run and its configuration.", "Run")},
        "/api/catalog": {"get": _get("What metrics and phases mean.", "Catalog")},
        "/api/history": {
            "get": _get(
                "Metrics, phases and critical path over steps, binned.",
                "History",
                _FIRST,
                _LAST,
                _POINTS,
                _query("names", "Metrics, with commas between; absent: those charted.", "string"),
                errors=(422,),
            )
        },
        "/api/step/{step}": {
            "get": _get(
                "One closed step.", "Step", _path("step", "From 0.", "integer"), errors=(404,)
            )
        },
        "/api/timeline": {
            "get": _get(
                "Spans of every process.",
                "Timeline",
                _FIRST,
                _LAST,
                _query("last_s", "The last so many seconds instead of steps.", "number"),
                errors=(422,),
            )
        },
        "/api/trace": {
            "get": _get(
                "The same as a trace for Perfetto or chrome://tracing.",
                "Trace",
                _FIRST,
                _LAST,
                errors=(422,),
            )
        },
        "/api/samples": {
            "get": _get("Completions, the newest first.", "Samples", *_SAMPLE_QUERY, errors=(422,))
        },
        "/api/samples/{id}": {
            "get": _get("One completion with its tokens.", "SampleWhole", _ID, errors=(404,))
        },
        "/api/samples/{id}/same": {
            "get": _get(
                "Completions of the same prompt over time, the oldest first.",
                "SamplesSame",
                _ID,
                errors=(404,),
            )
        },
        "/api/judgement": {"get": _get("What is notable, in words and numbers.", "Judgement")},
        "/api/fleet": {
            "get": _get("The rollout workers.", "Fleet"),
            "post": _post(
                "Asks for so many rollout workers.", "target", {"type": "integer", "minimum": 0}
            ),
        },
        "/api/fleet/drain": {
            "post": _post("Asks one rollout worker to go.", "name", {"type": "string"})
        },
        "/api/compare": {
            "get": _get(
                "Two runs side by side, where two are shown.",
                "Compare",
                _FIRST,
                _LAST,
                _POINTS,
                errors=(404, 422),
            )
        },
        "/api/stream": {
            "get": _get(_STREAM, None, errors=(503,), **_text("text/event-stream", "events"))
        },
    },
    "components": {
        "securitySchemes": {
            "view": {"type": "http", "scheme": "bearer", "description": "View or control token."},
            "cookie": {"type": "apiKey", "in": "cookie", "name": "tandem_RUN_ID"},
            "control": {"type": "http", "scheme": "bearer", "description": "Control token."},
        },
        "schemas": SCHEMAS,
    },
}
