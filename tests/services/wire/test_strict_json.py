"""Whatever a run measures and samples becomes strict JSON, and says what had to become text."""

import json
import math

import numpy as np
import pytest

from services.wire.strict_json import NUMBERS, encodable, encode, number_text, strict


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("text", NUMBERS)
def test_every_number_that_is_not_finite_has_its_text(text):
    assert number_text(NUMBERS[text]) == text


@pytest.mark.parametrize(
    "value",
    [{"a": [1, 2.5, None, True, "日本"]}, [], "text", 0, {"a": {"b": {}}}],
)
def test_what_json_can_hold_stays_as_it_is(value):
    assert json.loads(encode(value)) == value == strict(value)[0]
    assert strict(value)[1] == []


def test_what_json_cannot_hold_becomes_text_and_is_named():
    value = {"loss": math.nan, "in": {"high": [1.0, math.inf], "low": (-math.inf,)}, "x": 1.5}
    expected = {"loss": "NaN", "in": {"high": [1.0, "Infinity"], "low": ["-Infinity"]}, "x": 1.5}
    assert strict(value) == (expected, ["loss", "in.high.1", "in.low.0"])
    assert json.loads(encode(value), parse_constant=refuse) == expected


def test_a_lone_surrogate_is_its_escape_in_keys_and_values():
    value = {"a\ud800": ["\udfff b", math.nan], "pair": "\U0001f600"}
    expected = {"a\\ud800": ["\\udfff b", "NaN"], "pair": "\U0001f600"}
    assert strict(value) == (expected, ["a\\ud800.1"])
    assert json.loads(encode(value)) == expected
    assert json.loads(encode({"a\ud800": "\udfff"})) == {"a\\ud800": "\\udfff"}
    assert encodable("\ud800") == "\\ud800"


def test_arrays_of_numpy_are_lists():
    value = {"a": np.array([[1, 2]]), "b": np.float32(0.5), "c": np.array([math.nan])}
    assert strict(value) == ({"a": [[1, 2]], "b": 0.5, "c": ["NaN"]}, ["c.0"])


def test_a_value_that_json_has_no_form_for_is_named():
    with pytest.raises(ValueError, match=r"^a\.1 is a bytes, which JSON cannot hold$"):
        strict({"a": [1, b"x"]})
    with pytest.raises(TypeError):
        encode({"a": b"x"})
