"""Rows in the shapes of the field's data sets, and rows whose tests cannot be run."""

import base64
import json
import pickle
import zlib

import pytest

from rollout_worker.rewards.code.row_tests import CallTests, ScriptTests, read_tests

HUMANEVAL = 'def add(a, b):\n    """Adds."""\n'
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
STDIN = {"input": "1 2\n", "output": "3\n"}


def read(field=None, answer="", **item):
    return read_tests(item, answer, field)


def test_mbpp_has_statements_and_their_setup():
    row = {"test_list": ["assert f(1) == 2"], "test_setup_code": "import math"}
    assert read(**row) == CallTests(("assert f(1) == 2",), "import math")
    assert read(test_list=["assert f(1)"], test_imports=["import re", "import os"]) == CallTests(
        ("assert f(1)",), "import re\nimport os"
    )


@pytest.mark.parametrize("name", ["tests", "test_cases"])
def test_a_list_of_statements_may_be_json_text(name):
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    assert read(**{name: tests}) == read(**{name: json.dumps(tests)}) == CallTests(tuple(tests))


def test_humaneval_has_a_check_an_entry_point_and_code_in_its_prompt():
    read_row = read(test=CHECK, entry_point="add", prompt=HUMANEVAL)
    assert read_row == CallTests(("check(candidate)",), CHECK, HUMANEVAL, "add")
    assert read(test=CHECK, entry_point="Solution().add", prompt="Add two numbers.") == CallTests(
        ("check(candidate)",), CHECK, "", "Solution().add"
    )


def test_functions_named_test_are_a_test_each():
    text = (
        "from solution import f\n\ndef test_a():\n    assert f(1)\n\ndef test_b():\n    assert f(2)"
    )
    assert read(test=text) == CallTests(("test_a()", "test_b()"), text)


def test_a_program_of_assertions_is_one_test():
    text = "for one in range(3):\n    assert f(one) == one"
    assert read(test=text) == read(answer=text) == CallTests((text,))


@pytest.mark.parametrize(
    "row",
    [
        {"input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},  # APPS
        {"input_output": {"inputs": [["1 2", ""]], "outputs": [["3", ""]]}},
        {"public_test_cases": json.dumps([{**STDIN, "testtype": "stdin"}])},  # LiveCodeBench
        {"tests": json.dumps([{**STDIN, "type": "stdin_stdout"}])},  # DeepCoder
        {
            "verification_info": {  # open-r1
                "language": "python",
                "test_cases": [{**STDIN, "fn_name": None, "type": "stdin_stdout"}],
            }
        },
        {"answer": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},  # Eurus
    ],
)
def test_pairs_of_a_program(row):
    assert read(**row) == ScriptTests((("1 2\n", "3\n"),))


@pytest.mark.parametrize(
    "row",
    [
        {"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}},
        {
            "public_test_cases": [{"input": "1\n2", "output": "3", "testtype": "functional"}],
            "metadata": json.dumps({"func_name": "add"}),
        },
        {
            "verification_info": json.dumps(
                {
                    "test_cases": [
                        {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}
                    ]
                }
            )
        },
    ],
)
def test_pairs_of_a_function(row):
    expected = ("assert _same_value(candidate(*[1, 2]), 3)",)
    assert read(**row) == CallTests(expected, entry="add")


def test_public_and_private_cases_count_together_unless_a_field_is_named():
    public, private = [{"input": "1", "output": "1"}], [{"input": "2", "output": "2"}]
    row = {"public_test_cases": public, "private_test_cases": private}
    assert read(**row) == ScriptTests((("1", "1"), ("2", "2")))
    assert read(field="private_test_cases", **row) == ScriptTests((("2", "2"),))


def packed_tests():
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps([STDIN])))).decode()


@pytest.mark.parametrize(
    "row, message",
    [
        ({}, "there are no tests: the answer is ''"),
        ({"answer": "42"}, "the answer has no assert statement"),
        ({"tests": ["x + 1"]}, "has a test that asserts nothing: 'x + 1'"),
        ({"tests": ["assert f(1) = 2"]}, "the row's field 'tests' is no Python"),
        ({"test": CHECK}, "defines check(candidate), but the row has no entry_point"),
        ({"test": "def test_a(tmp_path):\n    assert f(1)"}, "test_a with arguments"),
        ({"test": "class TestF(unittest.TestCase): pass"}, "has the classes ['TestF']"),
        (
            {"private_test_cases": packed_tests()},
            "is packed, as the private tests of",
        ),
        ({"tests": [{"input": "1"}]}, "has a test without input or output"),
        ({"tests": [{"input": 1, "output": "1"}]}, "has an input or output that is no text: '1'"),
        ({"tests": [{**STDIN, "type": "functional"}]}, "but no fn_name or func_name"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "has 1 inputs and 0 outputs"),
        (
            {"verification_info": {"language": "cpp", "test_cases": [STDIN]}},
            "is for the language 'cpp': code_tests runs Python",
        ),
        ({"tests": [1, 2]}, "has no tests that code_tests knows: '[1, 2]'"),
        ({"field": "cases", "tests": ["assert f(1)"]}, "the row's field 'cases' is None"),
    ],
)
def test_a_row_whose_tests_cannot_run_says_why(row, message):
    with pytest.raises(ValueError) as refused:
        read(**row)
    assert message in str(refused.value)
