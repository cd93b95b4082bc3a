"""Strict JSON for what a run measures and samples.

A number that is not finite has no JSON form: it is written as the text "NaN", "Infinity" or
"-Infinity". A lone surrogate, which UTF-8 cannot encode, is written as the six characters `\\udXXX`
of its escape.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""By the text that represents each."""


def encode(value: Any) -> bytes:
    """The value as UTF-8 JSON without blanks.

    Raises:
        TypeError, ValueError: for a value that JSON has no form for.
    """
    try:
        return _dumps(value)
    except ValueError:  # the walk costs more than the writing, and few documents need it
        return _dumps(strict(value)[0])


def strict(value: Any, key: str = "") -> tuple[Any, list[str]]:
    """A copy that strict JSON can hold, and the keys of what had to become text in it.

    numpy scalars and arrays become numbers and lists; keys of nested values are joined by dots.

    Raises:
        ValueError: naming the key of a value that JSON has no form for.
    """
    nonfinite: list[str] = []
    return _strict(value, key, nonfinite), nonfinite


def number_text(value: float) -> str:
    """The text that represents a number that is not finite."""
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def encodable(text: str) -> str:
    """The text with lone surrogates as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _strict(value: Any, key: str, nonfinite: list[str]) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(encodable(key))
        return number_text(value)
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    inside = f"{key}." if key else ""
    if isinstance(value, Mapping):
        return {encodable(str(k)): _strict(v, f"{inside}{k}", nonfinite) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(v, f"{inside}{i}", nonfinite) for i, v in enumerate(value)]
    raise ValueError(f"{key} is a {type(value).__name__}, which JSON cannot hold")


def _dumps(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
