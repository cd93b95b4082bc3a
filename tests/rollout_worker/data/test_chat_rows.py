"""Rows as data sets have them: text or messages, with an answer or without, no mapping needed."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.prompts import load_prompts


class Turns:
    """Shows the roles and texts of a conversation as its tokens."""

    def encode_chat(self, messages, *, tools=()):
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return [ord(c) for c in text]


def said(prompt) -> str:
    return "".join(map(chr, prompt.token_ids))


@pytest.fixture(params=["jsonl", "parquet"])
def read(request, tmp_path):
    """Writes records in one of the two formats and reads them without a mapping."""

    def make(*records, system_prompt=None, template="{question}", **keys):
        path = tmp_path / f"rows.{request.param}"
        if request.param == "jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
        return load_prompts(
            SourceConfig(source=str(path), **keys),
            tokenizer=Turns(),
            system_prompt=system_prompt,
            question_template=template,
            max_prompt_tokens=10_000,
        )

    return make


@pytest.fixture
def load(read):
    return lambda *records, **options: read(*records, **options).prompts


USER = [{"role": "user", "content": "What is 2 + 2?"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]
SHAPES = {
    # TRL: prompt-only, standard and conversational, with a column for the reward function.
    "trl text": ({"prompt": "What is 2 + 2?", "solution": "4"}, "4"),
    "trl messages": ({"prompt": USER, "solution": "so\n#### 4"}, "4"),
    "trl answer": ({"prompt": USER, "answer": "4", "solution": "two and two"}, "4"),
    "trl without": ({"prompt": USER}, ""),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": USER,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 0, "answer": "so #### 4"},
        },
        "4",
    ),
    "verl number": ({"prompt": USER, "reward_model": {"ground_truth": 4, "style": "rule"}}, "4"),
    "verl structure": (
        {"prompt": USER, "reward_model": {"ground_truth": {"target": 4, "numbers": [2, 2]}}},
        '{"target": 4, "numbers": [2, 2]}',
    ),
    "verl without": ({"prompt": USER, "reward_model": {"style": "model"}}, ""),
    "verifiers question": (
        {"question": "What is 2 + 2?", "answer": "4", "info": {"level": 1}, "task": "sums"},
        "4",
    ),
    "verifiers prompt": (
        {"example_id": 0, "prompt": USER, "answer": "4", "info": '{"a": 1}', "task": "sums"},
        "4",
    ),
    "verifiers without": ({"prompt": USER, "answer": "", "info": {"tests": ["x"]}}, ""),
    "messages": ({"messages": USER, "answer": 4}, "4"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_other_systems_load_without_a_mapping(load, shape):
    record, answer = SHAPES[shape]
    (prompt,) = load(record)
    assert said(prompt) == "<user>What is 2 + 2?"
    assert (prompt.question, prompt.answer) == ("What is 2 + 2?", answer)
    assert prompt.item == record, "every column goes to the scorers"


def test_named_fields_win(load):
    record = {"question": "no", "prompt": "no", "answer": "1", "solution": "2", "ask": USER}
    (prompt,) = load(record, question_field="ask", answer_field="solution")
    assert said(prompt) == "<user>What is 2 + 2?" and prompt.answer == "2"
    (prompt,) = load(record)
    assert said(prompt) == "<user>no" and prompt.answer == "1"


def test_a_question_is_taken_before_a_prompt_as_it_always_was(load):
    (prompt,) = load({"question": "q", "prompt": CHAT, "answer": "1"})
    assert said(prompt) == "<user>q"


def test_an_answer_that_is_empty_gives_way_to_the_next(load):
    first, second = load(
        {"prompt": "a", "answer": None, "solution": "5", "reward_model": {"ground_truth": "6"}},
        {"prompt": "b", "answer": " ", "solution": None, "reward_model": {"ground_truth": "6"}},
    )
    assert (first.answer, second.answer) == ("5", "6")


def test_a_conversation_keeps_its_turns(load):
    (prompt,) = load({"prompt": CHAT, "answer": "6"}, template="<{question}>")
    assert said(prompt) == "<system>Be brief.<user>2 + 2?<assistant>4<user>And 3 + 3?"
    assert prompt.question == "user: 2 + 2?\n\nassistant: 4\n\nuser: And 3 + 3?"


def test_a_system_message_of_the_row_takes_the_place_of_the_configured_one(load):
    own, configured = load({"prompt": CHAT[:2]}, {"prompt": USER}, system_prompt="Be right.")
    (text,) = load({"prompt": "2 + 2?"}, system_prompt="Be right.", template="{question} Now.")
    assert said(own) == "<system>Be brief.<user>2 + 2?"
    assert said(configured) == "<system>Be right.<user>What is 2 + 2?"
    assert said(text) == "<system>Be right.<user>2 + 2? Now."


def test_a_set_counts_what_the_configuration_does_not_apply_to(read):
    found = read({"prompt": CHAT, "answer": "6"}, {"prompt": USER}, {"prompt": CHAT})
    assert (found.chats, found.with_system, found.unanswered) == (3, 2, 2)
    found = read({"prompt": "2 + 2?", "answer": "4"}, {"prompt": "3 + 3?"})
    assert (found.chats, found.with_system, found.unanswered) == (0, 0, 1)


class Kept(Turns):
    """Keeps the messages and tools that it was given last."""

    def encode_chat(self, messages, *, tools=()):
        self.messages, self.tools = messages, tools
        return [1]


def test_calls_of_tools_reach_the_template_whole(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    turns = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": None},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": turns}) + "\n")
    kept = Kept()
    load_prompts(
        SourceConfig(source=str(tmp_path / "a.jsonl")),
        tokenizer=kept,
        system_prompt=None,
        question_template="{question}",
        max_prompt_tokens=9,
    )
    assert kept.messages == [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


def read_file(path):
    load_prompts(
        SourceConfig(source=str(path)),
        tokenizer=Turns(),
        system_prompt=None,
        question_template="{question}",
        max_prompt_tokens=9,
    )


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "field 'prompt' has no messages: fill it in"),
        ([{"role": "boss", "content": "x"}], r"prompt\[0\] has role='boss', which is none of sys"),
        ([{"content": "x"}], r"prompt\[0\] has role=None, which is none of"),
        ([{"role": "user"}], r"prompt\[0\] of role 'user' must have text as content, got None"),
        ([user(" ")], r"prompt\[0\] of role 'user' is empty"),
        ([user([{"type": "text", "text": "x"}])], r"prompt\[0\] of role 'user' must have text"),
        ([CHAT[0]], "the last message of prompt is of role 'system', but the completion answers"),
        (CHAT[:3], "the last message of prompt is of role 'assistant', but the completion"),
        ([user("x"), CHAT[0], user("y")], r"prompt\[1\] is a system message, which only the fi"),
        ([CHAT[0], CHAT[0], user("y")], r"prompt\[1\] is a system message"),
    ],
)
def test_bad_messages_are_named_with_record_message_and_fix(load, messages, message):
    with pytest.raises(ValueError, match=rf"rows.*(line 1|row 0): {message}"):
        load({"prompt": messages, "answer": "1"})


@pytest.mark.parametrize(
    "calls", ["add", {"name": "add"}, ["add"], [{}], [{"id": "c1"}], [{"function": {"name": ""}}]]
)
def test_calls_that_name_no_function_are_refused(tmp_path, calls):
    turns = [
        user("x"),
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "3"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": turns}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: prompt\[1\].tool_calls must be a list of calls"):
        read_file(path)


@pytest.mark.parametrize("field", ["messages", "prompt", "question"])
def test_messages_as_json_text_are_refused(load, field):
    with pytest.raises(ValueError, match=f"field '{field}' has messages as JSON text"):
        load({field: json.dumps(CHAT[:2]), "answer": "1"})


@pytest.mark.parametrize(
    "text", ["[1, 2] =", "[1, 2]", '[{"a": 1}]', '[{"role": "x"}]', "[]", "[" * 5000]
)
def test_a_text_that_begins_like_messages_stays_a_text(load, text):
    assert load({"question": text, "answer": "1"})[0].question == text


def test_an_empty_name_of_a_field_names_none(load):
    with pytest.raises(ValueError, match="has no field ''"):
        load({"question": "x", "answer": "1"}, question_field="")


@pytest.mark.parametrize("messages", [["x"], [3], [user("x"), "y"], [[user("x")]]])
def test_an_item_that_is_no_message_is_refused(tmp_path, messages):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": messages}) + "\n")
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: prompt\[\d\] must be a message such"):
        read_file(path)


@pytest.mark.parametrize("value", [None, True, {"role": "user", "content": "x"}])
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(load, value):
    with pytest.raises(ValueError, match="field 'prompt' must be text or a number, or a list of"):
        load({"prompt": value, "answer": "1"})


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BARE = {"type": "function", "function": {"name": "now"}}


def tools_of(tmp_path, **record):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    kept = Kept()
    load_prompts(
        SourceConfig(source=str(tmp_path / "a.jsonl")),
        tokenizer=kept,
        system_prompt=None,
        question_template="{question}",
        max_prompt_tokens=9,
    )
    return kept.tools


@pytest.mark.parametrize(
    "given, tools",
    [
        ([ADD, BARE], (ADD, BARE)),
        (json.dumps([ADD]), (ADD,)),
        ([BARE | {"strict": None}], (BARE,)),
        (None, ()),
        ([], ()),
        ("", ()),
        ("null", ()),
        ("[]", ()),
    ],
)
def test_tools_of_a_row_are_a_list_or_its_text(tmp_path, given, tools):
    assert tools_of(tmp_path, prompt=USER, tools=given) == tools


@pytest.mark.parametrize("given", ["hammer", 5, {"name": "add"}, [5], ["add"], [{}], '{"a": 1}'])
def test_tools_that_are_no_schemas_are_refused(tmp_path, given):
    with pytest.raises(ValueError, match="line 1: field 'tools' must be a list of JSON schemas"):
        tools_of(tmp_path, prompt=USER, tools=given)


def test_beside_a_text_tools_is_a_column_like_any_other(tmp_path):
    assert tools_of(tmp_path, question="What hits a nail?", tools="hammer") == ()


def test_parquet_rows_with_different_schemas_lose_their_nulls(tmp_path):
    rows = [{"prompt": USER, "tools": [ADD]}, {"prompt": USER, "tools": [BARE]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    kept = Kept()
    load_prompts(
        SourceConfig(source=str(tmp_path / "a.parquet"), skip=1),
        tokenizer=kept,
        system_prompt=None,
        question_template="{question}",
        max_prompt_tokens=9,
    )
    assert kept.tools == (BARE,)
