"""Calls as models write them, by hand: right ones, and what the model reads of wrong ones."""

import re

import pytest

from rollout_worker.environments.tools.function_schemas import schemas_of
from rollout_worker.environments.tools.tool_calls import BadCall, CallReader, ToolCall

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer"},
            "note": {"type": "string"},
            "rows": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["a", "b"],
    },
}
NOW = {"name": "now"}
SCHEMAS = schemas_of([ADD, NOW])
HERMES = CallReader(SCHEMAS, "hermes")
LLAMA = CallReader(SCHEMAS, "llama")
GOOD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
SUM = ToolCall("add", {"a": 1, "b": 2})


def tag(text):
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>\n{GOOD}\n</tool_call>", [SUM]),
        (tag(GOOD), [SUM]),
        (f"I add.\n{tag(GOOD)} and wait", [SUM]),
        (f"{tag(GOOD)}\n{tag(GOOD)}", [SUM, SUM]),
        (tag('{"arguments":{"b":2,"a":1},"name":"add"}'), [SUM]),
        (tag('{"name": "now", "arguments": {}}'), [ToolCall("now", {})]),
        (
            tag('{"name": "add", "arguments": {"a": 1, "b": 2, "note": "</tool_call> é\\n"}}'),
            [ToolCall("add", {"a": 1, "b": 2, "note": "</tool_call> é\n"})],
        ),
        (f"<think>{tag('oops')} no</think>{tag(GOOD)}", [SUM]),
        (f"<think>{tag(GOOD)}</think>It is 3.", []),
        ("It is 3.", []),
        ("", []),
        (GOOD, []),
        ("a <tool_cal> b", []),
    ],
)
def test_hermes_calls_are_read(text, calls):
    assert HERMES.read(text) == calls


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (tag("add(1, 2)"), ["no JSON: Expecting value at character 0 of the call"]),
        (
            tag('{"name": "add", "arguments": {"a": 1 "b": 2}}'),
            ["no JSON: Expecting ',' delimiter at character 37 of the call"],
        ),
        (tag("{'name': 'add'}"), ["no JSON: Expecting property name enclosed in double quotes"]),
        (tag(""), ["no JSON: Expecting value at character 0"]),
        (f"<tool_call>{GOOD}", ["<tool_call> is not closed by </tool_call>"]),
        ("<tool_call>", ["<tool_call> is not closed by </tool_call>"]),
        (f"<tool_call>{tag(GOOD)}", ["<tool_call> is not closed by </tool_call>", SUM]),
        (f"<tool_call>{GOOD}<tool_call>{GOOD}</tool_call>", ["<tool_call> is not closed", SUM]),
        (f"{GOOD}</tool_call>", ["</tool_call> without a <tool_call> before it"]),
        (tag(f"{GOOD}, {GOOD}"), ["between the JSON object and </tool_call> stands ', {"]),
        (tag(f"{GOOD}\nplease"), ["between the JSON object and </tool_call> stands 'please'"]),
        (tag(f"[{GOOD}]"), ['a call is a JSON object {"name": ..., "arguments": ...}, got a list']),
        (tag('{"name": "add"}'), [r"exactly the keys name and arguments, got \['name'\]"]),
        (
            tag('{"name": "add", "arguments": {}, "id": 1}'),
            [r"exactly the keys name and arguments, got \['arguments', 'id', 'name'\]"],
        ),
        (
            tag('{"name": "add", "parameters": {}}'),
            [r"exactly the keys name and arguments, got \['name', 'parameters'\]"],
        ),
        (
            tag('{"name": "ad", "arguments": {}}'),
            [r"there is no tool 'ad' \(nearest: 'add'\): there are add, now"],
        ),
        (tag('{"name": 3, "arguments": {}}'), ["there is no tool 3: there are add, now"]),
        (
            tag('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'),
            ["add: arguments must be a JSON object, got a str"],
        ),
        (tag('{"name": "add", "arguments": null}'), ["must be a JSON object, got a NoneType"]),
        (tag('{"name": "add", "arguments": {"a": 1}}'), ["add: 'b' is a required property"]),
        (
            tag('{"name": "add", "arguments": {"a": 1, "b": "2"}}'),
            ["add: argument b: '2' is not of type 'integer'"],
        ),
        (
            tag('{"name": "add", "arguments": {"a": 1, "b": true}}'),
            ["add: argument b: True is not of type 'integer'"],
        ),
        (
            tag('{"name": "add", "arguments": {"a": 1, "b": 2, "rows": [1, "x"]}}'),
            ["add: argument rows 1: 'x' is not of type 'number'"],
        ),
        (
            tag('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}'),
            ["add: Additional properties are not allowed .'c' was unexpected"],
        ),
        (
            tag('{"name": "now", "arguments": {"zone": "utc"}}'),
            ["now: Additional properties are not allowed"],
        ),
        (
            tag('{"name": "add", "arguments": {"a": 1, "a": 2, "b": 2}}'),
            ["no JSON: a key stands twice in an object"],
        ),
        (tag('{"name": "add", "arguments": {"a": NaN, "b": 2}}'), ["NaN is no number of JSON"]),
        (tag("[" * 100_000), ["no JSON: "]),
        (tag('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}"), ["no JSON: "]),
        (f"{tag('{')} {tag(GOOD)} {tag('}')}", ["no JSON", SUM, "no JSON"]),
    ],
)
def test_what_is_wrong_with_hermes_calls_is_said(text, problems):
    check(HERMES.read(text), problems)


def check(found, expected):
    assert len(found) == len(expected), found
    for one, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, ToolCall):
            assert one == wanted
        else:
            assert isinstance(one, BadCall) and len(one.problem) < 500
            assert re.search(wanted, one.problem) or wanted in one.problem, one.problem


LLAMA_GOOD = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (LLAMA_GOOD, [SUM]),
        (f"\n {LLAMA_GOOD} ", [SUM]),
        (f"<|python_tag|>{LLAMA_GOOD}", [SUM]),
        (f"<|python_tag|>\n{LLAMA_GOOD}", [SUM]),
        (f"{LLAMA_GOOD}; {LLAMA_GOOD}", [SUM, SUM]),
        (f"<|python_tag|>{LLAMA_GOOD};{LLAMA_GOOD}", [SUM, SUM]),
        ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', [SUM]),
        ("<|python_tag|>add.call(a=1, b=2)", [SUM]),
        (
            '<|python_tag|>add.call(a=1, b=2, note="x; \\"y\\"", rows=[1, -2.5])',
            [ToolCall("add", {"a": 1, "b": 2, "note": 'x; "y"', "rows": [1, -2.5]})],
        ),
        ("<|python_tag|>now.call()", [ToolCall("now", {})]),
        ("It is 3.", []),
        ('It is {"name": "add"}.', []),
        ('{"sum": 3}', []),
        ("", []),
        (tag(GOOD), []),
    ],
)
def test_llama_calls_are_read(text, calls):
    assert LLAMA.read(text) == calls


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('{"name": "add", "parameters": {"a": 1', ["no JSON: Expecting ',' delimiter"]),
        (
            '{"name": "add", "arguments": {"a": 1, "b": 2}}',
            ["exactly the keys name and parameters"],
        ),
        ('{"name": "add"}', [r"exactly the keys name and parameters, got \['name'\]"]),
        ('{"type": "tool", "name": "now", "parameters": {}}', ["exactly the keys name and param"]),
        (f"{LLAMA_GOOD} done", [SUM, "after the JSON object stands 'done'"]),
        (f"{LLAMA_GOOD};", [SUM, "no JSON: Expecting value"]),
        (f"{LLAMA_GOOD}{LLAMA_GOOD}", [SUM, "after the JSON object stands"]),
        (f"I call <|python_tag|>{LLAMA_GOOD}", ["stands within the turn: a call is the whole"]),
        ("<|python_tag|>", [r"stands a JSON object or name.call\(argument=value\), got ''"]),
        ("<|python_tag|>print(3)", ["got 'print.3.'"]),
        ("<|python_tag|>add.call(1, 2)", ["got 'add.call.1, 2.'"]),
        ("<|python_tag|>add.call(a=open('x'))", ["name.call.argument=value.*, got"]),
        ("<|python_tag|>add.call(a={1, 2})", ["name.call.argument=value.*, got"]),
        ("<|python_tag|>add.call(a=1, a=2)", ["name.call.argument=value.*, got"]),
        ("<|python_tag|>add.call(**{'a': 1})", ["add: '[ab]' is a required property|unexp"]),
        ("<|python_tag|>add.call(" + "(" * 3000, ["name.call.argument=value.*, got"]),
        ("<|python_tag|>add.call(a='1', b=2)", ["add: argument a: '1' is not of type 'integer'"]),
        ("<|python_tag|>sub.call(a=1)", ["there is no tool 'sub'"]),
        ("<|python_tag|>x\0y", ["name.call.argument=value.*, got"]),
    ],
)
def test_what_is_wrong_with_llama_calls_is_said(text, problems):
    check(LLAMA.read(text), problems)


@pytest.mark.parametrize(
    ("reader", "text"),
    [(HERMES, "<tool_call>"), (HERMES, tag(GOOD)), (LLAMA, '{"name": "now", "parameters": {}};')],
)
def test_a_turn_that_repeats_a_call_without_end_is_not_read_to_its_end(reader, text):
    calls = reader.read(text * 20_000)
    assert len(calls) == 257 and type(calls[0]) is type(calls[255])
    assert calls[-1] == BadCall("a turn has at most 256 calls: the rest is not read")


def test_a_schema_that_allows_further_arguments_takes_them():
    schema = {"name": "f", "parameters": {"type": "object", "additionalProperties": True}}
    reader = CallReader(schemas_of([schema]), "hermes")
    call = '{"name": "f", "arguments": {"x": 1}}'
    assert reader.read(tag(call)) == [ToolCall("f", {"x": 1})]
