"""Messages and calls of tools, back and forth with the official client."""

import json

import openai
import pytest

from rollout_worker.environments.openai_endpoint.chat_messages import (
    AssistantTurn,
    assistant_turn,
    policy_messages,
)
from rollout_worker.environments.openai_endpoint.chat_request import BadChatRequest
from rollout_worker.environments.tools.tool_calls import CallReader
from tests.rollout_worker.environments.openai_endpoint.scripted import (
    TOOLS,
    add,
    ask,
    call,
    playing,
    run,
    user,
)

HERMES = CallReader(TOOLS, "hermes")
LLAMA = CallReader(TOOLS, "llama")


def call_json(arguments='{"a": 1, "b": 2}'):
    function = {"name": "add", "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}


CALL = call_json()
TEXT = f"I add.\n{call(1, 2)}"
TURN = AssistantTurn(TEXT, "I add.", (CALL,))
ANSWER = {"role": "tool", "tool_call_id": "call00000", "content": "3"}


def test_turns_after_the_results_of_tools():
    async def play():
        texts = (f"I add.{call(1, 2)}\n{call(3, 4)}", call(3, 7), "It is 10.")
        async with playing(*texts, tools=TOOLS) as (policy, client):
            messages = [user("1 + 2 + 3 + 4?")]
            ids, reasons, contents = [], [], []
            while not reasons or reasons[-1] == "tool_calls":
                found = await ask(client, *messages, tools=TOOLS, tool_choice="auto")
                message = found.choices[0].message
                reasons.append(found.choices[0].finish_reason)
                contents.append(message.content)
                messages.append(message)
                for one in message.tool_calls or []:
                    ids.append(one.id)
                    content = str(add(**json.loads(one.function.arguments)))
                    messages.append({"role": "tool", "tool_call_id": one.id, "content": content})
            assert contents == ["I add.", None, "It is 10."]
            assert reasons == ["tool_calls", "tool_calls", "stop"]
            assert ids == ["call00000", "call00001", "call00100"]
            assert [(one["role"], one["content"]) for one in policy.said] == [
                ("user", "1 + 2 + 3 + 4?"),
                ("assistant", texts[0]),
                ("tool", "3"),
                ("tool", "7"),
                ("assistant", texts[1]),
                ("tool", "10"),
                ("assistant", texts[2]),
            ]

    run(play())


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL]},
        {"content": "I add.", "tool_calls": [CALL]},
        {"content": [{"type": "text", "text": "I add."}], "tool_calls": [CALL]},
        {"content": TEXT, "tool_calls": [CALL]},
        {"content": TEXT},
        {"refusal": None, "annotations": [], "tool_calls": [call_json('{"b":2,"a":1}')]},
    ],
)
def test_a_turn_with_calls_comes_back_as_it_was_sampled(message):
    asked = [user("1 + 2?"), {"role": "assistant"} | message, ANSWER]
    assert policy_messages(asked, {1: TURN}) == [
        user("1 + 2?"),
        {"role": "assistant", "content": TEXT},
        ANSWER,
    ]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "I add."}, r"messages\[1\] must have the tool_calls that were returned, \[{"),
        ({"content": None, "tool_calls": [CALL, CALL]}, "must have the tool_calls that were"),
        ({"content": None, "tool_calls": [CALL | {"id": "x"}]}, "must have the tool_calls that"),
        ({"tool_calls": [call_json('{"a": 1}')]}, "must have the tool_calls that were returned"),
        ({"tool_calls": [{"id": "call00000"}]}, "must have the tool_calls that were returned"),
        ({"content": None, "tool_calls": "x"}, "must have a list as tool_calls"),
        ({"content": "Hm.", "tool_calls": [CALL]}, "no content or the one .*I add.*got 'Hm.'"),
    ],
)
def test_a_changed_turn_is_refused(message, problem):
    asked = [user("1 + 2?"), {"role": "assistant"} | message, ANSWER]
    with pytest.raises(BadChatRequest, match=problem):
        policy_messages(asked, {1: TURN})


def test_calls_that_a_turn_did_not_make_are_refused():
    asked = [user("Hello"), {"role": "assistant", "content": "Hi.", "tool_calls": [CALL]}, ANSWER]
    with pytest.raises(BadChatRequest, match=r"the tool_calls that were returned, \[\]"):
        policy_messages(asked, {1: AssistantTurn("Hi.", "Hi.")})


def test_examples_of_calls_become_messages_as_chat_templates_read_them():
    example = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = policy_messages([user("1 + 2?"), example, ANSWER], {})
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert messages[2] == ANSWER


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (["Hello"], r'messages\[0\] must have one of the roles system, .*, got "Hello"'),
        ([{"content": "Hello"}], "must have one of the roles"),
        ([{"role": "function", "content": "x"}], "must have one of the roles"),
        ([{"role": "user"}], "must have a text as content, or a list of"),
        ([{"role": "user", "content": 5}], "must have a text as content, .* got 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a text as content, .*image_url"),
        ([{"role": "user", "content": "x", "audio": {}}], "'audio', but user takes role, content,"),
        ([{"role": "user", "content": "x", "name": 5}], "has name=5, which must be a text"),
        ([user("x"), {"role": "assistant"}, user("y")], r"messages\[1\] must have a text as cont"),
        ([user("x"), {"role": "assistant", "content": "y"}], "is the last and the model's own"),
        ([user("x"), ANSWER], r"messages\[1\] answers the call 'call00000', which no message"),
        ([user("x"), {"role": "tool", "content": "3"}], "answers the call None, which no message"),
        (
            [user("x"), {"role": "assistant", "tool_calls": [{"id": "a"}]}, user("y")],
            r"messages\[1\] has a call that is not {'id': ...",
        ),
    ],
)
def test_a_message_that_breaks_a_rule_is_refused(messages, problem):
    with pytest.raises(BadChatRequest, match=problem):
        policy_messages(messages, {})


@pytest.mark.parametrize(
    "text",
    ["It is 3.", f"{call(1, 2)}<tool_call>oops</tool_call>", call(1, '"2"'), "<tool_call>{", ""],
)
def test_a_turn_without_calls_or_with_a_malformed_one_stays_text(text):
    assert assistant_turn(text, 0, HERMES) == AssistantTurn(text, text)


@pytest.mark.parametrize(
    ("reader", "text", "content"),
    [
        (HERMES, TEXT, "I add."),
        (HERMES, call(1, 2), None),
        (HERMES, f"<think>{call(5, 5)}</think>\n{call(1, 2)}", f"<think>{call(5, 5)}</think>"),
        (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}', None),
        (LLAMA, 'Hm.</think>{"name": "add", "parameters": {"a": 1, "b": 2}}', "Hm.</think>"),
    ],
)
def test_calls_are_read(reader, text, content):
    assert assistant_turn(text, 0, reader) == AssistantTurn(text, content, (CALL,))


def test_calls_stay_text_where_none_are_to_be_read():
    async def play():
        async with playing(call(1, 2), "It is 3.", tools=TOOLS) as (policy, client):
            found = await ask(client, user("1 + 2?"), tool_choice="none")
            message = found.choices[0].message
            assert (message.content, message.tool_calls) == (call(1, 2), None)
            assert found.choices[0].finish_reason == "stop"
            await ask(client, user("1 + 2?"), message.to_dict(), user("It is 3."))
            assert policy.said[1]["content"] == call(1, 2)

    run(play())


def test_a_changed_message_is_refused_through_the_client():
    async def play():
        async with playing(call(1, 2), tools=TOOLS) as (policy, client):
            found = await ask(client, user("1 + 2?"))
            message = found.choices[0].message.model_dump()
            message["tool_calls"][0]["function"]["arguments"] = "{}"
            with pytest.raises(openai.BadRequestError, match="send messages of the assis") as it:
                await ask(client, user("1 + 2?"), message, ANSWER)
            assert it.value.param == "messages[1]"
            assert policy.turns == 1

    run(play())


def test_a_cut_turn_with_calls_says_that_it_was_cut():
    async def play():
        async with playing(call(1, 2), tools=TOOLS, finish_reason="length") as (_, client):
            found = await ask(client, user("1 + 2?"))
            assert found.choices[0].finish_reason == "length"
            assert found.choices[0].message.tool_calls is not None

    run(play())
