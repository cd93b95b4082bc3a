r"""Compares mathematical expressions with Math-Verify, and numbers among them exactly.

The library compares floating-point numbers after rounding to six decimals, and other numbers to 15
digits with small ones cut to zero: 0.0000001 would equal 0.0000004. Here a decimal fraction is the
rational number that it spells, and two numbers are equal if their difference is zero.
"""

import logging
from collections.abc import Sequence
from typing import Any

import math_verify
import sympy

_DIGITS = 1000
"""Digits to which the library compares numbers inside of sets, equations and matrices."""

# Both calls warn that they have no timeout; the pool has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def parse_expressions(text: str) -> list[Any]:
    """Returns the readings of the last expression of a text, empty if there is none.

    The library's own timeout needs the alarm signal of the main thread. It is off, since the pool
    bounds the time from outside.
    """
    found = math_verify.parse(text, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
    return [_without_floats(reading) for reading in found]


def _without_floats(reading: Any) -> Any:
    """A reading with the rational numbers that its decimal fractions spell."""
    if not isinstance(reading, (sympy.Basic, sympy.MatrixBase)):
        return reading  # the text itself
    # The printed form has the digits of the text; the binary value has others.
    spelled = {each: sympy.Rational(str(each)) for each in reading.atoms(sympy.Float)}
    return reading.xreplace(spelled)


def equal_expressions(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether a reading of the gold answer equals one of the answer found."""
    return any(_equal(one, other) for one in gold for other in found)


def _equal(gold: Any, found: Any) -> bool:
    if _is_number(gold) and _is_number(found):
        is_equal = (gold - found).doit().equals(0)
        if is_equal is not None:
            return is_equal
    return math_verify.verify(
        gold, found, numeric_precision=_DIGITS, timeout_seconds=None, raise_on_error=True
    )


def _is_number(reading: Any) -> bool:
    """Whether a reading is a number; the library has rules of its own for percentages."""
    return (
        isinstance(reading, sympy.Expr)
        and bool(reading.is_number)
        and not reading.has(sympy.UnevaluatedExpr)
    )
