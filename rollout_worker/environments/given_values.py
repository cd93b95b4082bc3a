"""Values that a configuration gives to environments and their tools, checked by type hints."""

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from rollout_worker.rewards.scorers import BadScorer


def check_values(what: str, function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Refuses a value that is not of its type hint.

    Args:
        what: how an error begins.
        function: whose arguments they are; its hints may have bounds of pydantic.
        values: by name.

    Raises:
        BadScorer: for the first one, with the value and the rule.
    """
    adapters = _adapters(function)
    for name, value in values.items():
        if name not in adapters:
            continue
        try:
            adapters[name].validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            rule = error.errors()[0]["msg"]
            raise BadScorer(f"{what}{name}={value!r:.80} cannot be: {rule}") from None


@functools.cache
def _adapters(function: Callable[..., Any]) -> dict[str, pydantic.TypeAdapter[Any]]:
    hints = typing.get_type_hints(function, include_extras=True)
    return {name: pydantic.TypeAdapter(hint) for name, hint in hints.items() if name != "return"}
