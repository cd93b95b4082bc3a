"""Strict JSON for whatever a log holds.

A number that is not finite is written as the text "NaN", "Infinity" or "-Infinity", and a lone
surrogate, which UTF-8 cannot encode, as the six characters of its escape: as in the run's logs.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def encode(value: Any) -> bytes:
    """The value as UTF-8 JSON without blanks.

    Raises:
        TypeError: for a value that JSON has no form for.
    """
    try:
        text = _dumps(value)
    except ValueError:  # the walk costs more than the writing, and few documents need it
        text = _dumps(finite(value))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text).encode()


def finite(value: Any) -> Any:
    """A copy in which every number that is not finite is a text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else number_text(value)
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


def number_text(value: float) -> str:
    """What stands for a number that is not finite."""
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
