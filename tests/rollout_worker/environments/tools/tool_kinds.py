"""Tools of every kind, good and bad, that the tests of this folder name."""

import time
from typing import Literal

from tests.rollout_worker.environments.kinds import Guessing


def weather(city: str, unit: Literal["c", "f"] = "c", days: int = 1) -> str:
    """Tells the weather.

    Of one place.

    Args:
        city: Name of the place,
            as in an atlas.
        unit (str): Of the temperature.
        days: How many: 1
            to 7.

    Returns:
        A line.
    """
    return f"{city}: 20 {unit}, {days}"


async def later(number: float) -> dict:
    """Doubles a number.

    Args:
        number: Any.
    """
    return {"doubled": 2 * number}


def bad(does: str) -> object:
    """Does what it is told.

    Args:
        does: A word.
    """
    if does == "raises":
        raise LookupError("the table fell over")
    if does == "hangs":
        time.sleep(1000)
    if does == "exits":
        raise SystemExit(3)
    return {"object": object(), "nan": float("nan"), "none": None, "10 mb": "x" * 10_000_000}[does]


class Offering(Guessing):
    """Offers tools, and a schema."""

    def __init__(self, most=8, more=None):
        super().__init__(most)
        schema = {"name": "add", "parameters": {"type": "object"}}
        self.tools = [weather, schema, *([more] if more else [])]


class Unmade(Guessing):
    def __init__(self):
        raise LookupError("no table")
