r"""Compares mathematical expressions with Math-Verify, and numbers among them exactly.

The library compares floating-point numbers after rounding to six decimals, and other numbers to 15
digits with small ones cut to zero: 0.0000001 would equal 0.0000004. Here a decimal fraction is the
rational number that it spells, and two numbers are equal if their difference is zero.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

import math_verify
import sympy

from rollout_worker.rewards.answers import final_text, lenient_answer, parse_number
from rollout_worker.rewards.plain_text import plain_text
from rollout_worker.rewards.quantity import SCALE_WORDS

_DIGITS = 1000
"""Digits to which the library compares numbers inside of sets, equations and matrices."""

# What may follow a number: a scale, a base as subscript, a fraction, an upright imaginary unit.
_BEFORE_SCALE = r"(?:[-\s~{}$]|\\[,;: ]|\\(?:text|mathrm|textbf)(?![A-Za-z]))*"
_LEFT_OUT = re.compile(
    rf"\d{_BEFORE_SCALE}(?:{SCALE_WORDS})s?(?![^\W_])"
    r"|\d\s?_\s?\{?\s?\d|\d[\u2080-\u2089\u00bc-\u00be\u2150-\u215e]"
    r"|\d\s?\\(?:text|mathrm)\s?\{\s?[ij]\s?\}",
    re.IGNORECASE,
)

# Both calls warn that they have no timeout; the pool has one.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equals_gold(completion: str, gold_text: str, gold: Sequence[Any]) -> bool:
    """Whether the last expression of a completion equals the gold answer.

    The library leaves some of what follows a number out, and would find 7 thousand and a 7 with the
    subscript 8 equal to 7. Our own reader of numbers decides about these.

    Args:
        gold_text: the gold answer.
        gold: its readings.
    """
    last = final_text(completion)
    if _LEFT_OUT.search(last):
        answer, right = lenient_answer(completion), parse_number(gold_text)
        if answer is None or answer.value is None or right is None:
            shown = last.strip(" $.").removeprefix("\\boxed{").removesuffix("}")
            return plain_text(shown) == plain_text(gold_text)
        return answer.value == right
    return equal_expressions(gold, parse_expressions(completion))


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
