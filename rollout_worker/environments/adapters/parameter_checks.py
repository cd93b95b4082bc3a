"""Checks of what a configuration gives to an adapter: one error with the value and the rule."""

import json
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rollout_worker.rewards.scorers import BadScorer
from services.user_code.import_path import nearest_hint

Extract = Literal["marker", "whole"]
"""What counts of a turn: the line after the last `####`, or all of it."""
NonEmpty = Annotated[str, Field(min_length=1)]


class BadAdapter(BadScorer):
    """An adapter cannot be used with its parameters; the message says why and what to do."""


def check_template(name: str, value: str, known: Sequence[str]) -> None:
    """Refuses a text that is none for `str.format`, or has other fields than those."""
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


def json_of(name: str, value: Mapping[str, Any] | None) -> str:
    """A mapping of JSON values as a text, the same for equal mappings; None is an empty one."""
    try:
        return json.dumps(dict(value or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise BadAdapter(f"{name}={value!r:.80} must have JSON values: {error}") from None


def say(text: str, role: str = "user") -> list[dict[str, str]]:
    """One message."""
    return [{"role": role, "content": text}]
