"""The calls of tools in what a model wrote, read strictly.

A turn with no mark of a call is an answer. What has such a mark and is no right call becomes a
`BadCall`, whose text tells the model what is wrong with it; nothing is guessed or repaired.
"""

import ast
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jsonschema
import jsonschema.exceptions
import referencing

from services.user_code.import_path import nearest_hint

CallFormat = Literal["hermes", "llama"]
"""`hermes`: any text, in it `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and
Hermes write it. `llama`: the whole turn is `{"name": ..., "parameters": {...}}`, several of them
with semicolons between, or begins with `<|python_tag|>` and then such objects or `name.call(...)`,
as Llama 3 writes it."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK_END = "</think>"
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BEGINS = re.compile(r'\{\s*"(?:name|type|parameters)"\s*:')
_SPACE = re.compile(r"\s*")
MOST_CALLS = 256
"""Of a turn; a model that repeats the mark of a call does not keep others waiting."""
_SHOWN = 200
_MOST_CODE = 10_000
"""Characters of `name.call(...)`."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that its tool can take."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BadCall:
    """What was meant as a call and is none."""

    problem: str
    """For the model."""


class CallReader:
    """Reads the calls of tools with these schemas."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]], call_format: CallFormat):
        """Args:
        schemas: as `function_schemas.py` makes them.
        call_format: in which the model writes calls.
        """
        self._call_format = call_format
        self._read = {"hermes": self._read_hermes, "llama": self._read_llama}[call_format]
        functions = [schema["function"] for schema in schemas]
        self._validators = {one["name"]: _validator(one.get("parameters")) for one in functions}

    def read(self, text: str) -> list[ToolCall | BadCall]:
        """The calls of a turn in their order; none where it is an answer.

        What stands in front of `</think>` is reasoning and calls nothing.
        """
        calls = self._read(text.rpartition(_THINK_END)[2])
        found = list(itertools.islice(calls, MOST_CALLS))
        if next(calls, None) is not None:
            found.append(BadCall(f"a turn has at most {MOST_CALLS} calls: the rest is not read"))
        return found

    def text_before_calls(self, text: str) -> str:
        """What a turn with calls says before the first of them, its reasoning included."""
        reasoning, end, answer = text.rpartition(_THINK_END)
        is_call_alone = self._call_format == "llama"
        return reasoning + end + ("" if is_call_alone else answer.partition(_OPEN)[0])

    def _read_hermes(self, text: str) -> Iterator[ToolCall | BadCall]:
        place = 0
        while tag := _TAG.search(text, place):
            place = tag.end()
            if tag[0] == _CLOSE:
                yield BadCall(f"{_CLOSE} without a {_OPEN} before it")
                continue
            value, end, problem = _decoded(text, place)
            closes, opens = text.find(_CLOSE, end), text.find(_OPEN, end)
            if closes < 0 or 0 <= opens < closes:
                yield BadCall(f"{_OPEN} is not closed by {_CLOSE}")
                place = end
                continue
            place = closes + len(_CLOSE)
            if not problem and (more := text[end:closes].strip()):
                problem = f"between the JSON object and {_CLOSE} stands {_shown(more)}"
            yield BadCall(problem) if problem else self._checked(value, "arguments")

    def _read_llama(self, text: str) -> Iterator[ToolCall | BadCall]:
        text = text.strip()
        tagged = text.startswith(_PYTHON_TAG)
        place = _SPACE.match(text, len(_PYTHON_TAG) * tagged).end()  # pyright: ignore[reportOptionalMemberAccess]
        if tagged and not text.startswith("{", place):
            yield self._python_call(text[place:])
            return
        if not tagged and not _LLAMA_BEGINS.match(text):
            if _PYTHON_TAG in text:
                yield BadCall(f"{_PYTHON_TAG} stands within the turn: a call is the whole turn")
            return
        while True:
            value, end, problem = _decoded(text, place)
            if problem:
                yield BadCall(problem)
                return
            if isinstance(value, dict) and value.get("type") == "function":
                del value["type"]
            yield self._checked(value, "parameters")
            rest = text[end:].lstrip()
            if not rest:
                return
            if not rest.startswith(";"):
                yield BadCall(f"after the JSON object stands {_shown(rest)}")
                return
            place = _SPACE.match(text, text.index(";", end) + 1).end()  # pyright: ignore[reportOptionalMemberAccess]

    def _python_call(self, code: str) -> ToolCall | BadCall:
        rule = f"after {_PYTHON_TAG} stands a JSON object or name.call(argument=value), got "
        try:
            if len(code) > _MOST_CODE:
                raise ValueError
            call = ast.parse(code, mode="eval").body
            match call:
                case ast.Call(ast.Attribute(ast.Name(name), "call"), [], keywords):
                    pairs = [(one.arg or "**", ast.literal_eval(one.value)) for one in keywords]
                case _:
                    return BadCall(rule + _shown(code))
            # Only what JSON can say is an argument.
            arguments = json.loads(json.dumps(_unique(pairs), allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return BadCall(rule + _shown(code))
        return self._checked({"name": name, "parameters": arguments}, "parameters")

    def _checked(self, value: Any, key: str) -> ToolCall | BadCall:
        """Args:
        value: decoded JSON.
        key: of the arguments in it.
        """
        if not isinstance(value, dict):
            kind = type(value).__name__
            return BadCall(f'a call is a JSON object {{"name": ..., "{key}": ...}}, got a {kind}')
        if set(value) != {"name", key}:
            return BadCall(f"a call has exactly the keys name and {key}, got {sorted(value)}")
        name, arguments = value["name"], value[key]
        if not isinstance(name, str) or name not in self._validators:
            names = list(self._validators)
            hint = nearest_hint(name, names) if isinstance(name, str) else ""
            return BadCall(f"there is no tool {_shown(name)}{hint}: there are {', '.join(names)}")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            return BadCall(f"{name}: {key} must be a JSON object, got a {kind}")
        error = jsonschema.exceptions.best_match(self._validators[name].iter_errors(arguments))
        if error is not None:
            where = "".join(f" {step}" for step in error.absolute_path)
            what = f"argument{where}: " if where else ""
            return BadCall(f"{name}: {what}{error.message[:_SHOWN]}")
        return ToolCall(name, arguments)


def _validator(parameters: Mapping[str, Any] | None) -> Any:
    schema = dict(parameters or {})
    if set(schema) <= {"type", "properties", "required"}:  # it says nothing of other arguments
        schema["additionalProperties"] = False
    # Nothing is fetched that a schema refers to.
    return jsonschema.Draft202012Validator(schema, registry=referencing.Registry())


def _decoded(text: str, place: int) -> tuple[Any, int, str]:
    """The JSON value at a place, where it ends, and what is wrong with it; empty if nothing is."""
    start = _SPACE.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
    try:
        value, end = _DECODER.raw_decode(text, start)
        return value, end, ""
    except json.JSONDecodeError as error:
        return None, place, f"no JSON: {error.msg} at character {error.pos - start} of the call"
    except (ValueError, RecursionError) as error:
        return None, place, f"no JSON: {str(error)[:_SHOWN] or type(error).__name__}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_constant: Callable[[str], Any] = _refuse
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant)


def _shown(value: Any) -> str:
    return repr(value if len(str(value)) <= _SHOWN // 2 else f"{str(value)[: _SHOWN // 2]}...")
