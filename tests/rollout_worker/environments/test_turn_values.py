"""Which messages of an environment are taken, and how chat templates go on with them."""

import json

import pytest

from models.load_tokenizer import load_tokenizer
from rollout_worker.environments.turn_values import (
    BadTurn,
    Turn,
    digest_of,
    messages_of,
    parse_turn,
    turn_of,
)

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASKED = {"role": "user", "content": "1 + 2?"}
ASKED_AGAIN = [ASKED]
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "name": "add", "tool_call_id": "1", "content": "3"}


def test_calls_and_answers_of_tools_are_messages():
    read = messages_of([ASKED, CALLING, ANSWER], "what reset returns")
    assert read == [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ANSWER]
    answer = Turn(read, 0.0, False)._asdict()
    assert parse_turn(json.loads(json.dumps(answer))).messages == read
    assert messages_of([{**ASKED, "tool_calls": None}], "it") == [ASKED]
    assert messages_of([{**CALLING, "tool_calls": ({"name": "add"},)}, ANSWER], "it")[0] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "add"}],
    }


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            {**CALLING, "tool_calls": "add"},
            "tool_calls of message 0 of it must be a list .* str 'add'",
        ),
        ({**CALLING, "tool_calls": {"name": "add"}}, "must be a list such as .* got dict"),
        ({**CALLING, "tool_calls": [{"function": {}}]}, "got the call dict"),
        ({**CALLING, "tool_calls": ["add"]}, "got the call str 'add'"),
        ({**CALLING, "tool_calls": [{"name": 3}]}, "got the call dict"),
        ({**CALLING, "tool_calls": [{"name": "a", "x": object()}]}, "of JSON values: Object of"),
        ({**CALLING, "tool_calls": [{"name": "a", "x": float("nan")}]}, "of JSON values: "),
        ({**CALLING, "content": 3}, "with texts alone; message 0 of it is dict"),
        ({**CALLING, "tool_calls": []}, "with texts alone; message 0 of it is dict"),
        ({"role": "tool", "content": None}, "with texts alone; message 0 of it is dict"),
        ({"role": "tool", "content": ["3"]}, "with texts alone; message 0 of it is dict"),
        ({"role": "tool"}, "message 0 of it has no role or no content"),
        ("text", "message 0 of it has no role or no content|with texts alone"),
        (3, "with texts alone; message 0 of it is int '3'"),
    ],
)
def test_what_is_no_message_is_refused(message, error):
    with pytest.raises(BadTurn, match=error):
        messages_of([message, ASKED], "it")


@pytest.mark.parametrize(
    ("info", "numbers"),
    [
        ({"calls": 2, "share": 0.5, "won": True}, {"calls": 2.0, "share": 0.5, "won": 1.0}),
        ({"text": "a", "list": [1], "none": None, 3: 4, "": 1, "a\nb": 1}, {}),
        ({"nan": float("nan"), "huge": 1e300, "long" * 30: 1, "good": -1}, {"good": -1.0}),
        ({str(number): number for number in range(99)}, {str(n): float(n) for n in range(64)}),
        (None, {}),
        ("text", {}),
    ],
)
def test_the_numbers_of_info_are_kept(info, numbers):
    turn = turn_of((ASKED_AGAIN, 0.0, False, info))
    assert turn.numbers == numbers
    assert parse_turn(json.loads(json.dumps(turn._asdict()))) == turn
    assert digest_of(turn) == digest_of(turn_of((ASKED_AGAIN, 0.0, False, {})))


# --- the chat templates of models


LLAMA = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:' }}"
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}"
    "{{ messages[0].content | trim }}{{ '<|eot_id|>' }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + f.name }}'
    "{{ '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% elif m.role in ('tool', 'ipython') %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    "{% if m.content is iterable %}{{ m.content | tojson }}{% endif %}{{ '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}"
)
"""In the form of Llama 3: tools in the first message, what they answer as JSON, one call a turn."""
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools' }}"
    "{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}{{ c.function | tojson }}"
    "{{ '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""In the form of Qwen2.5 and Hermes: tools in a system message, what they answer in a user's.
"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOLD = [{"role": "tool", "content": '3\n"of" <|im_end|>'}, {"role": "tool", "content": "4"}]


def ids_of(tokenizer, text):
    return tokenizer._backend.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "after"),
    [
        (
            QWEN,
            '<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n"of" <|im_end|>\n</tool_response>\n'
            "<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA,
            '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"3\\n\\"of\\" <|im_end|>"'
            '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
    ids=["qwen", "llama"],
)
def test_what_tools_answer_follows_a_turn_as_the_template_writes_it(template, after):
    tokenizer = load_tokenizer("deploy/demo/model", chat_template=template).with_tools(TOOLS)
    begun = messages_of([ASKED, CALLING, ANSWER, ASKED], "reset")
    assert '"name": "add"' in tokenizer.decode(tokenizer.encode_chat(begun)).replace("'", '"')
    sampled = [*begun, {"role": "assistant", "content": ""}, *TOLD]
    for messages in (begun, sampled):
        ids = tokenizer.encode_after_turn(messages, TOLD, last_id=0, history="as_rendered")
        assert tokenizer.decode(ids) == after
    # What a tool answers ends no turn.
    [stop] = tokenizer.stop_ids
    assert ids.count(stop) == after.count("<|im_end|>") - 1


@pytest.mark.shared
def test_what_tools_answer_follows_a_turn_of_qwen3(shared):
    tokenizer = load_tokenizer(str(shared / "data" / "tokenizers" / "qwen3")).with_tools(TOOLS)
    begun = messages_of([ASKED, CALLING, ANSWER, ASKED], "reset")
    text = tokenizer.decode(tokenizer.encode_chat(begun))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    ids = tokenizer.encode_after_turn(
        begun, [ANSWER], last_id=min(tokenizer.stop_ids), history="as_rendered"
    )
    assert tokenizer.decode(ids).removeprefix("<|im_end|>") == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_that_ended_with_another_stop_token_is_not_ended_twice():
    tokenizer = load_tokenizer("deploy/demo/model", stop_tokens=["<|endoftext|>"])
    assert len(tokenizer.stop_ids) == 2
    told = [{"role": "user", "content": "4"}]
    after = "\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    for last_id in tokenizer.stop_ids:
        ids = tokenizer.encode_after_turn([ASKED], told, last_id=last_id, history="as_rendered")
        assert tokenizer.decode(ids) == after
    ids = tokenizer.encode_after_turn([ASKED], told, last_id=7, history="as_rendered")
    assert tokenizer.decode(ids) == "<|im_end|>" + after


def test_token_ids_take_the_place_of_messages():
    turn = Turn([], 0.0, False, token_ids=[5, 0, 7], max_tokens=3)
    assert parse_turn(json.loads(json.dumps(turn._asdict()))) == turn
    assert len({digest_of(turn), digest_of(turn._replace(max_tokens=4))}) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": []},
        {"token_ids": "5"},
        {"token_ids": [5.0]},
        {"token_ids": [True]},
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"max_tokens": 2.5},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": "3"},
    ],
)
def test_token_ids_of_another_form_are_refused(wrong):
    answer = Turn([], 0.0, False, token_ids=[5], max_tokens=3)._asdict() | wrong
    with pytest.raises(BadTurn, match="which is no turn"):
        parse_turn(answer)
