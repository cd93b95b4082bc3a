"""Checks of what a configuration gives to an adapter: one error with the value and the rule."""

import json
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

from services.user_code.import_path import nearest_hint


class BadAdapter(ValueError):
    """An adapter cannot be used with its parameters; the message says why and what to do."""


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuses what is no whole number from `least` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadAdapter(f"{name}={value!r:.80} must be a whole number, at least {least}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Refuses what is no number between two, which are allowed."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise BadAdapter(f"{name}={value!r:.80} must be a number from {low:g} to {high:g}")


def check_text(name: str, value: Any) -> None:
    """Refuses what is no text; an empty one too."""
    if not isinstance(value, str) or not value:
        raise BadAdapter(f"{name}={value!r:.80} must be a text")


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuses what is not one of some names."""
    if value not in known:
        raise BadAdapter(
            f"{name}={value!r:.80} must be one of {', '.join(known)}"
            f"{nearest_hint(str(value), list(known))}"
        )


def check_template(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuses what is no text for `str.format`, or has other fields than those."""
    check_text(name, value)
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(value) if field is not None]
    except ValueError as error:
        raise BadAdapter(
            f"{name}={value!r:.200} is no template: {error}; a brace that stands for itself is "
            "written twice"
        ) from None
    for field in fields:
        first = field.partition(".")[0].partition("[")[0]
        if first not in known:
            braced = ", ".join(f"{{{one}}}" for one in known)
            raise BadAdapter(
                f"{name}={value!r:.200} has the field {{{field}}}; there are {braced}"
                f"{nearest_hint(first, list(known))}"
            )


def json_of(name: str, value: Any) -> str:
    """A mapping of JSON values as a text, the same for equal mappings; None is an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise BadAdapter(f"{name}={value!r:.80} must be a mapping")
    try:
        return json.dumps(dict(value or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise BadAdapter(f"{name}={value!r:.80} must have JSON values: {error}") from None


def say(text: str, role: str = "user") -> list[dict[str, str]]:
    """One message."""
    return [{"role": role, "content": text}]
