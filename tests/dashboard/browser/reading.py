"""Reads numbers as the page writes them, and holds them against those of a file."""

import math
import re

UNITS = {
    "": 1.0,
    "%": 0.01,
    "ms": 1e-3,
    "s": 1.0,
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}
ODD = {"NaN": math.nan, "∞": math.inf, "−∞": -math.inf}
_NUMBER = re.compile(r"(?P<digits>[−-]?[\d,]+(?:\.(?P<decimals>\d+))?)(?:e(?P<power>[−-]?\d+))?")
ROUNDED_BEFORE = 2e-5
"""Relative; what the server sends has five significant digits."""


def says(text: str, value: float | None) -> bool:
    """Whether a text of the page is a value, rounded to the digits that are shown.

    Args:
        text: such as `4.65 s`, `12,345`, `41 %`, `3 min 20 s`, `NaN` or `–`.
        value: of a file; None where it has none.
    """
    text = text.strip()
    if value is None:
        return text in ("", "–")
    if text in ODD:
        return ODD[text] == value or (math.isnan(ODD[text]) and math.isnan(value))
    if not math.isfinite(value):
        return False
    if text == "<0.1 %":
        return 0 < value < 0.0005
    shown, half = _read(text)
    return abs(value - shown) <= half * 1.02 + abs(value) * ROUNDED_BEFORE


def _read(text: str) -> tuple[float, float]:
    """Value of a text, and half the unit of its last digit."""
    if parts := re.fullmatch(r"(?:(\d+) h )?(\d+) min(?: (\d\d) s)?", text):
        hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return hours * 3600 + minutes * 60 + seconds, 0.5 if parts[3] else 60.0
    found = _NUMBER.match(text)
    assert found, f"{text!r} is no number"
    unit = text[found.end() :].strip()
    scale = UNITS.get(unit, 1.0) * 10.0 ** int((found["power"] or "0").replace("−", "-"))
    digits = float(found["digits"].replace(",", "").replace("−", "-"))
    return digits * scale, 0.5 * 10.0 ** -len(found["decimals"] or "") * scale
