"""The measure that other tests hold the page against is itself right."""

import math

import pytest

from tests.dashboard.browser.reading import says


@pytest.mark.parametrize(
    "text, value",
    [
        ("4.65 s", 4.6521),
        ("340 ms", 0.3404),
        ("3 min 20 s", 200.3),
        ("1 h 04 min", 3850.0),
        ("12,345", 12345.0),
        ("41 %", 0.4149),
        ("<0.1 %", 0.0004),
        ("1.4 GB", 1.43e9),
        ("−1.2e−5", -1.21e-5),
        ("NaN", math.nan),
        ("−∞", -math.inf),
        ("–", None),
    ],
)
def test_a_rounded_number_is_known(text, value):
    assert says(text, value)


@pytest.mark.parametrize(
    "text, value",
    [
        ("4.65 s", 4.66),
        ("340 ms", 0.3411),
        ("41 %", 0.4201),
        ("NaN", 1.0),
        ("1.00", math.nan),
        ("∞", -math.inf),
        ("0", None),
    ],
)
def test_another_number_is_not(text, value):
    assert not says(text, value)
