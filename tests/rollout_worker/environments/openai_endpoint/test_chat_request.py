"""Fields of a request: what changes nothing is taken, and all else is refused."""

import json

import openai
import pytest

from rollout_worker.environments.openai_endpoint.chat_request import (
    BadChatRequest,
    RunSampling,
    parse_chat_request,
)
from tests.rollout_worker.environments.openai_endpoint.scripted import (
    TOOLS,
    ask,
    playing,
    run,
    user,
)

RUN = RunSampling(temperature=0.7, stop_strings=("END",))
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER_ADD = {"type": "function", "function": TOOLS[0]["function"] | {"description": "Subtracts."}}


def parsed(fields, *, sampling=RUN, tools=()):
    body = {"model": "m", "messages": [user("Hello")]} | fields
    return parse_chat_request(json.dumps(body).encode(), sampling, tools)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7, "top_p": 1, "n": 1, "top_logprobs": 0, "logit_bias": {}},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0},
        {"top_k": -1, "min_p": 0.0, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"stop": ["END"]},
        {"stop": "END"},
        {"seed": 7, "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": []},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"temperature": None, "max_tokens": None, "tools": None, "n": None, "any_name": None},
    ],
)
def test_values_that_change_nothing_are_taken(fields):
    assert parsed(fields) == parsed({"stream": fields.get("stream", False)})


BAD_FIELDS = [
    ({"temperature": 1.0}, "temperature=1.0 must be 0.7 or missing: .* rollout.temperature is 0.7"),
    ({"temperature": "0.7"}, 'temperature="0.7" must be 0.7'),
    ({"top_p": 0.9}, "top_p=0.9 must be 1 or missing: the policy is trained on what it sampled"),
    ({"n": 2}, "n=2 must be 1 or missing: an episode is one conversation"),
    ({"n": True}, "n=true must be 1"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5 must be 0"),
    ({"frequency_penalty": -1}, "frequency_penalty=-1 must be 0"),
    ({"logit_bias": {"1": 100}}, "logit_bias={.*} must be {} or missing"),
    ({"stop": ["OTHER"]}, r'stop=\["OTHER"\] must be \["END"\] or "END" or .*stop_strings'),
    ({"stop": []}, r"stop=\[\] must be"),
    ({"top_k": 5}, "top_k=5 must be -1 or 0"),
    ({"response_format": {"type": "json_object"}}, 'must be {"type": "text"} or missing'),
    ({"top_logprobs": 5}, "top_logprobs=5 must be 0 or missing: .* only the one that was sampled"),
    ({"logprobs": 1}, "logprobs must be true or false, got 1"),
    ({"return_token_ids": "yes"}, 'return_token_ids must be true or false, got "yes"'),
    ({"stream": "yes"}, 'stream must be true or false, got "yes"'),
    ({"stream_options": {}}, "stream_options needs stream=true"),
    ({"stream": True, "stream_options": {"usage": True}}, "an object with include_obfuscation and"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage must be true or"),
    ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, or missing, got 0"),
    ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
    ({"max_completion_tokens": True}, "max_completion_tokens must be a whole number"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens=2 and max_tokens=1"),
    ({"max_token": 5}, "'max_token' is no known field .nearest: 'max_tokens'.: correct it or"),
    ({"reasoning_effort": "low"}, "reasoning_effort is not served here: leave it out"),
    ({"functions": []}, "functions is not served here"),
    ({"model": 5}, "model must be a text, any will do, got 5"),
    ({"model": None}, "model must be a text, any will do, got null"),
    ({"messages": []}, r"messages must be a list of messages, got \[\]"),
    ({"messages": "Hello"}, 'messages must be a list of messages, got "Hello"'),
    ({"tools": [WEATHER]}, "'weather' is not one of the run .the run has no tools.: declare .*"),
    ({"tools": "add"}, 'tools must be a list of JSON schemas, got "add"'),
    ({"tools": [{"name": "add"}]}, "a tool must be {'function': {'name': ...}}, got"),
    ({"tool_choice": "required"}, 'tool_choice="required" must be "auto" or "none" or missing'),
    ({"parallel_tool_calls": False}, "parallel_tool_calls=false must be true or missing"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_a_wrong_field_is_refused(fields, message):
    with pytest.raises(BadChatRequest, match=message):
        parsed(fields)


def test_the_client_gets_each_refusal_with_its_field_and_no_turn_is_sampled():
    async def play():
        async with playing(temperature=0.7, stop_strings=["END"]) as (policy, client):
            for fields, message in BAD_FIELDS:
                body = {"messages": [user("Hello")], "model": "m"} | fields
                with pytest.raises(openai.BadRequestError, match=message) as refused:
                    await client.post("/chat/completions", body=body, cast_to=object)
                assert refused.value.param in {*fields, "include_usage"}
            assert policy.turns == 0

    run(play())


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([WEATHER], "'weather' is not one of the run .the run's tools are add.: .*rollout.tools ="),
        ([*TOOLS, WEATHER], "'weather' is not one of the run"),
        ([OTHER_ADD], "the tool 'add' has another schema than in the run, .*Adds two numbers"),
        ([*TOOLS, *TOOLS], "tools must be the run's, add, each once, or missing"),
        ([], "tools must be the run's, add, each once, or missing"),
    ],
)
def test_other_tools_than_those_of_the_run_are_refused(tools, message):
    with pytest.raises(BadChatRequest, match=message):
        parsed({"tools": tools}, tools=TOOLS)


def test_the_tools_of_the_run_are_taken_with_what_clients_add_to_them():
    function = TOOLS[0]["function"] | {"strict": False}
    for tools in (TOOLS, [{"type": "function", "function": function}], None):
        assert parsed({"tools": tools}, tools=TOOLS).reads_calls
    assert not parsed({"tool_choice": "none"}, tools=TOOLS).reads_calls


def test_the_temperature_of_a_run_that_says_nothing_is_1():
    async def play():
        async with playing("Hi.") as (_, client):
            await ask(client, user("Hello"), temperature=1, top_p=1.0, seed=3, stop=[])

    run(play())
