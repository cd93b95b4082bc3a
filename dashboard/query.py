"""Query parameters: how each is read and checked, and how OpenAPI describes it."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MOST = 10**12
TEXT_CHARS = 1000


class BadQuery(ValueError):
    """An invalid parameter; the message names value, rule and fix."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One query parameter."""

    name: str
    about: str
    schema: Mapping[str, Any]
    """JSON schema."""
    parse: Callable[[str, str], Any]
    """From name and text to the value; raises BadQuery."""
    default: Any = None
    """Value of an absent or empty parameter."""


def read_query(given: Mapping[str, str], parameters: Iterable[Parameter]) -> dict[str, Any]:
    """The value of each parameter.

    Raises:
        BadQuery: for an unknown name or an invalid value.
    """
    known = {one.name: one for one in parameters}
    for name in given:
        if name not in known:
            raise BadQuery(f"{name[:40]!r} is not a parameter here: give {', '.join(known)}")
    return {
        name: one.parse(name, text) if (text := given.get(name, "")) else one.default
        for name, one in known.items()
    }


def whole(
    name: str, about: str, *, least: int = 0, most: int = MOST, default: int | None = None
) -> Parameter:
    """A whole number."""

    def parse(name: str, text: str) -> int:
        if not text.isdecimal() or len(text) > 15 or not least <= int(text) <= most:
            raise BadQuery(
                f"{name}={text[:40]!r} must be a whole number between {least} and {most}"
            )
        return int(text)

    schema = {"type": "integer", "minimum": least, "maximum": most, "default": default}
    left_out = [*(["maximum"] if most == MOST else []), *(["default"] if default is None else [])]
    for key in left_out:
        del schema[key]
    return Parameter(name, about, schema, parse, default)


def number(name: str, about: str, *, above: float = -math.inf, most: float = math.inf) -> Parameter:
    """A finite number."""

    def parse(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and above < value <= most):
            raise BadQuery(
                f"{name}={text[:40]!r} must be a number above {above:g}, at most {most:g}"
            )
        return value

    return Parameter(name, about, {"type": "number"}, parse)


def text(name: str, about: str, *, default: str | None = None) -> Parameter:
    """A text."""

    def parse(name: str, text: str) -> str:
        if len(text) > TEXT_CHARS:
            raise BadQuery(f"{name} has {len(text)} characters: give at most {TEXT_CHARS}")
        return text

    return Parameter(name, about, {"type": "string"}, parse, default)


def names(name: str, about: str) -> Parameter:
    """Texts separated by commas, as a list."""

    def parse(_: str, text: str) -> list[str]:
        return [one for one in text.split(",") if one]

    return Parameter(name, about, {"type": "string"}, parse)


def choice(name: str, about: str, *choices: str) -> Parameter:
    """One of these texts."""

    def parse(name: str, text: str) -> str:
        if text not in choices:
            raise BadQuery(f"{name}={text[:40]!r} must be {' or '.join(choices)}")
        return text

    return Parameter(name, about, {"type": "string", "enum": list(choices)}, parse)


def flag(name: str, about: str) -> Parameter:
    """True for `1`, false for `0` or an empty value."""
    one_of = choice(name, about, "0", "1")

    def parse(name: str, text: str) -> bool:
        return one_of.parse(name, text) == "1"

    return dataclasses.replace(one_of, parse=parse, default=False)
