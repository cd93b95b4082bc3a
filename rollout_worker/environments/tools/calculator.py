"""A calculator for models: arithmetic alone, with bounds on what it costs."""

import ast
import math
import operator
from collections.abc import Callable

MOST_CHARACTERS = 500
MOST_BITS = 4096
"""Of a whole number."""

_Number = int | float
_BINARY: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[_Number], _Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Calculates an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3 + 4) * 2.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has over {MOST_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("the expression is nested too deeply") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(sign, operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            return _combined(type(sign), _value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is no number and no + - * / // % ** of numbers")


def _combined(sign: type[ast.operator], left: _Number, right: _Number) -> _Number:
    # What the result of a power would have is known before it is calculated.
    bits = left.bit_length() if isinstance(left, int) and abs(left) > 1 else 0
    if sign is ast.Pow and isinstance(right, int) and bits * right > 2 * MOST_BITS:
        raise OverflowError
    return _bounded(_BINARY[sign](left, right))


def _bounded(value: _Number) -> _Number:
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    return value
