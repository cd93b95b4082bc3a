"""Makes the OpenAPI 3.1 document from the endpoints of the application and `schemas.py`.

The tests check every answer of the application against it.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from dashboard.query import Parameter
from dashboard.schemas import SCHEMAS, VERSION

Json = dict[str, Any]

_PATH_PARAMETERS = {
    "id": ("string", "As /api/samples lists it, such as t123."),
    "path": ("string", "Name of the file."),
    "step": ("integer", "From 0."),
}
_ERRORS = {
    401: "No token, or a wrong one.",
    403: "The request came from another site.",
    404: "It does not exist.",
    409: "The run cannot do this in its current state.",
    422: "An invalid value; the text names value, rule and fix.",
    503: "The driver cannot be reached, or too many pages are open.",
    504: "The driver did not answer in time.",
}


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One operation: its handler, whose docstring is the summary, its input and its output."""

    path: str
    handler: Callable[..., Any]
    answer: str
    """Name of a schema, or a media type other than JSON; empty for any JSON."""
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    """Statuses, except 401."""
    body: tuple[str, Json] | None = None
    """Name and schema of the one value that a POST sends; None for a GET."""
    is_open: bool = False
    """Whether it needs no token."""

    @property
    def method(self) -> str:
        """GET or POST."""
        return "GET" if self.body is None else "POST"


def document(endpoints: Iterable[Endpoint]) -> Json:
    """The document of /openapi.json."""
    paths: dict[str, Json] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem dashboard",
            "version": VERSION,
            "description": "What a run does, where its time goes, and how to change its workers. "
            'A number that is not finite is the text "NaN", "Infinity" or "-Infinity".',
        },
        "security": [{"view": []}, {"cookie": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "view": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "View or control token.",
                },
                "cookie": {"type": "apiKey", "in": "cookie", "name": "tandem_RUN_ID"},
                "control": {"type": "http", "scheme": "bearer", "description": "Control token."},
            },
            "schemas": SCHEMAS,
        },
    }


def _operation(one: Endpoint) -> Json:
    about = inspect.getdoc(one.handler) or ""
    errors = {
        str(status): {"description": _ERRORS[status], "content": _json(_ref("Error"))}
        for status in sorted({401, *one.errors})
    }
    found: Json = {
        "summary": about,
        "parameters": [*map(_path_parameter, re.findall(r"{(\w+)}", one.path))]
        + [
            {"name": p.name, "in": "query", "description": p.about, "schema": p.schema}
            for p in one.parameters
        ],
        "responses": {
            "200": {"description": HTTPStatus.OK.phrase, "content": _content(one.answer)},
            **errors,
        },
    }
    if one.is_open:
        found["security"] = []
    if one.body is not None:
        key, value = one.body
        found["security"] = [{"control": []}]
        body = {"type": "object", "required": [key], "properties": {key: value}}
        found["requestBody"] = {
            "required": True,
            "content": _json({**body, "additionalProperties": False}),
        }
    return found


def _path_parameter(name: str) -> Json:
    kind, about = _PATH_PARAMETERS[name]
    place = {"name": name, "in": "path", "required": True}
    return {**place, "description": about, "schema": {"type": kind}}


def _content(answer: str) -> Json:
    if "/" in answer:
        return {answer: {"schema": {"type": "string"}}}
    return _json(_ref(answer) if answer else {})


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
