"""JSON schemas of tools, from the type hints and docstrings of plain functions.

They have the form that chat templates read. transformers can make them too, but for every type hint
it imports torch where that is installed, which each process of environments would pay for.
"""

import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema
import pydantic
from jsonschema.exceptions import best_match
from pydantic.fields import FieldInfo
from pydantic.json_schema import PydanticJsonSchemaWarning

from rollout_worker.rewards.scorers import BadScorer

MOST_BYTES = 2**18
"""Of the schemas of one environment, as JSON."""
_SECTION = re.compile(r"^(\w+):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)(?: *\([^)]*\))?: *(.*)")
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class BadTool(BadScorer):
    """What is to be a tool cannot be one; the message says which, why, and what to do."""


def schemas_of(tools: Any) -> list[dict[str, Any]]:
    """The schemas of an environment's `tools`.

    Args:
        tools: a list of functions and of schemas.

    Raises:
        BadTool: if it is none, one of them cannot be a tool, or two have one name.
    """
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise BadTool(
            f"tools must be a list of functions, or of JSON schemas, got {type(tools).__name__} "
            f"{str(tools)[:80]!r}"
        )
    schemas = [schema_of(tool) for tool in tools]
    names = [one["function"]["name"] for one in schemas]
    if len(set(names)) < len(names):
        raise BadTool(f"the names of tools must differ, got {names}")
    if (size := len(json.dumps(schemas))) > MOST_BYTES:
        raise BadTool(
            f"the schemas of the tools have {size:,} bytes, at most {MOST_BYTES:,} may be"
        )
    return schemas


def schema_of(tool: Any) -> dict[str, Any]:
    """The schema of one tool: `{type: function, function: {name, description, parameters}}`.

    Args:
        tool: a function, plain or async, whose arguments have type hints and are described in the
            `Args:` of its docstring; or its schema, with or without the outer mapping.

    Raises:
        BadTool: if it is neither.
    """
    if isinstance(tool, Mapping):
        return _checked_schema(tool)
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        raise BadTool(
            f"a tool must be a function or its JSON schema, got {type(tool).__name__} "
            f"{str(tool)[:80]!r}"
        )
    description, arguments = _described(tool)
    properties, required = _parameters(tool)
    for name, schema in properties.items():
        if name not in arguments:
            raise BadTool(
                f"tool {tool.__name__!r}: its docstring must describe the argument {name!r} for "
                f"the model, under `Args:` in a line `{name}: ...`"
            )
        schema["description"] = arguments[name]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """The schemas of its arguments by name, and which are required."""
    name = function.__name__
    for one in inspect.signature(function).parameters.values():
        if one.kind not in _KINDS:
            raise BadTool(f"tool {name!r}: each argument must be passed by name, {one} cannot be")
        if one.annotation is one.empty:
            raise BadTool(f"tool {name!r}: its argument {one.name!r} needs a type hint")
    try:
        adapter: Any = pydantic.TypeAdapter  # its stub takes types alone
        with warnings.catch_warnings(action="ignore", category=PydanticJsonSchemaWarning):
            schema = adapter(function).json_schema()
    except (pydantic.errors.PydanticUserError, NameError, TypeError) as error:
        text = str(error).partition("\n")[0]
        raise BadTool(
            f"tool {name!r}: a type hint has no JSON schema ({text}): use types of JSON, such as "
            "str, int, float, bool, list[str], Literal"
        ) from error
    schema = _without_titles(schema)
    properties = schema.get("properties", {})
    _check_defaults(function, properties)
    if "$defs" in schema:
        raise BadTool(
            f"tool {name!r}: a type hint names the class {', '.join(schema['$defs'])}: give the "
            "tool as a JSON schema, or take its fields as arguments"
        )
    return properties, schema.get("required", [])


def _check_defaults(function: Callable[..., Any], properties: Mapping[str, Any]) -> None:
    """Refuses a default that is no JSON value, or that the model could not give itself."""
    for name, one in inspect.signature(function).parameters.items():
        schema = properties.get(name)  # none where a field gives it another name
        if schema is None or one.default is one.empty or isinstance(one.default, FieldInfo):
            continue
        what = f"tool {function.__name__!r}: the default of {name!r}"
        if "default" not in schema:
            raise BadTool(f"{what} is no JSON value, {one.default!r:.80}: take null, or a text")
        error = best_match(jsonschema.Draft202012Validator(schema).iter_errors(schema["default"]))
        if error is not None:
            raise BadTool(
                f"{what} is not of its type hint ({error.message[:200]}): correct one of them, as "
                "`int | None` for a default of None"
            )


def _without_titles(schema: Any) -> Any:
    """Without the names of arguments in other words, which pydantic adds."""
    if isinstance(schema, dict):
        kept = {k: v for k, v in schema.items() if k != "title" or not isinstance(v, str)}
        return {key: _without_titles(value) for key, value in kept.items()}
    return [_without_titles(one) for one in schema] if isinstance(schema, list) else schema


def _described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a docstring of Google's style says of a function, and of its arguments by name."""
    parts = _SECTION.split(inspect.getdoc(function) or "")
    if not (description := parts[0].strip()):
        raise BadTool(
            f"tool {function.__name__!r} needs a docstring that tells the model what it does"
        )
    arguments: dict[str, str] = {}
    body = dict(zip(parts[1::2], parts[2::2], strict=True)).get("Args", "")
    name = ""
    for line in textwrap.dedent(body).splitlines():
        if found := _ARGUMENT.fullmatch(line):
            name, arguments[name] = found[1], found[2]
        elif name and line.strip():
            arguments[name] += f" {line.strip()}"
    return description, {name: text.strip() for name, text in arguments.items()}


def _checked_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadTool(
            f"the schema of a tool must name its function, as {{'type': 'function', 'function': "
            f"{{'name': 'add', 'parameters': {{...}}}}}}, got {str(dict(tool))[:80]!r}"
        )
    try:
        function = json.loads(json.dumps(dict(function), allow_nan=False))
        jsonschema.Draft202012Validator.check_schema(function.get("parameters", {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadTool(f"tool {name!r}: its schema is no JSON: {error}") from error
    except jsonschema.SchemaError as error:
        text = error.message[:200]
        raise BadTool(f"tool {name!r}: its parameters are no JSON schema: {text}") from error
    return {"type": "function", "function": function}
