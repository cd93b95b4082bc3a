"""Episodes over real sockets, with the official client: chat, keys, and clients that go away."""

import asyncio
import json
import signal
import subprocess
import sys

import httpx
import openai
import pytest

from rollout_worker.environments.openai_endpoint.chat_request import MOST_BODY_BYTES
from tests.rollout_worker.environments.openai_endpoint.scripted import (
    ScriptedPolicy,
    ask,
    client_of,
    playing,
    run,
    serving,
    user,
)


def test_a_conversation_of_two_turns():
    async def play():
        async with playing("Hi.", "Bye.") as (policy, client):
            first = await ask(client, {"role": "developer", "content": "Be short."}, user("Hello"))
            assert first.choices[0].message.content == "Hi."
            assert first.choices[0].finish_reason == "stop"
            assert first.choices[0].message.tool_calls is None
            assert (first.object, first.model) == ("chat.completion", "any")
            assert first.usage is not None
            assert first.usage.to_dict() == {
                "prompt_tokens": len("Be short.Hello"),
                "completion_tokens": len("Hi.") + 1,
                "total_tokens": len("Be short.Hello") + len("Hi.") + 1,
            }
            message = first.choices[0].message.model_dump()  # with its nulls
            parts = [{"type": "text", "text": "Good"}, {"type": "text", "text": "bye"}]
            second = await ask(
                client,
                {"role": "system", "content": "Be short."},
                user("Hello"),
                message,
                user(parts),
                max_completion_tokens=7,
            )
            assert second.choices[0].message.content == "Bye."
            assert policy.max_tokens == [None, 7]
            assert policy.said == [
                {"role": "system", "content": "Be short."},
                user("Hello"),
                {"role": "assistant", "content": "Hi."},
                user("Goodbye"),
                {"role": "assistant", "content": "Bye."},
            ]

    run(play())


def test_a_plain_client_plays_in_a_thread():
    async def play():
        async with serving() as endpoint:
            key, url = endpoint.register(ScriptedPolicy("Hi.")), endpoint.base_url

            def agent():
                with openai.OpenAI(base_url=url, api_key=key) as client:
                    found = client.chat.completions.create(model="m", messages=[user("Hello")])
                    return found.choices[0].message.content

            assert await asyncio.to_thread(agent) == "Hi."

    run(play())


def test_the_one_model_is_listed():
    async def play():
        async with playing() as (_, client):
            assert [model.id async for model in client.models.list()] == ["policy"]

    run(play())


def test_a_turn_that_was_cut_says_so():
    async def play():
        async with playing("Hi", finish_reason="length") as (_, client):
            found = await ask(client, user("Hello"), max_tokens=3)
            assert found.choices[0].finish_reason == "length"

    run(play())


def test_two_episodes_at_once_keep_apart():
    async def play():
        async with serving() as endpoint:
            names = ["one", "two", "three"]
            policies = [ScriptedPolicy(f"I am {name}.").hold() for name in names]
            keys = [endpoint.register(policy) for policy in policies]
            clients = [client_of(endpoint, key) for key in keys]
            asked = [
                asyncio.create_task(ask(client, user(f"{name}?")))
                for client, name in zip(clients, names, strict=True)
            ]
            for policy in policies:
                await policy.begun.wait()
            for policy, answer, name in reversed(list(zip(policies, asked, names, strict=True))):
                policy.may_go.set()
                assert (await answer).choices[0].message.content == f"I am {name}."
                assert policy.said[0] == user(f"{name}?")
            for client in clients:
                await client.close()

    run(play())


def test_a_request_without_a_key_is_refused():
    async def play():
        async with serving() as endpoint, httpx.AsyncClient() as client:
            policy = ScriptedPolicy("no")
            key = endpoint.register(policy)
            body = {"model": "m", "messages": [user("Hello")]}
            for header in (None, "", "Bearer", "Bearer x", f"Basic {key}", key, f"Bearer {key}x"):
                headers = {} if header is None else {"Authorization": header}
                for method, path in (("POST", "chat/completions"), ("GET", "models")):
                    url = f"{endpoint.base_url}/{path}"
                    answer = await client.request(method, url, json=body, headers=headers)
                    assert answer.status_code == 401, header
                    error = answer.json()["error"]
                    assert error["code"] == "invalid_api_key"
                    assert "send policy.api_key" in error["message"]
            assert policy.turns == 0

    run(play())


def test_the_key_of_an_ended_episode_is_refused():
    async def play():
        async with serving() as endpoint:
            policy = ScriptedPolicy("Hi.", "no")
            key = endpoint.register(policy)
            async with client_of(endpoint, key) as client:
                await ask(client, user("Hello"))
                endpoint.forget(key)
                endpoint.forget(key)
                with pytest.raises(openai.AuthenticationError, match="its episode has ended"):
                    await ask(client, *policy.said, user("More"))
            assert policy.turns == 1

    run(play())


def test_a_turn_of_an_episode_that_ends_is_refused():
    async def play():
        async with serving() as endpoint:
            policy = ScriptedPolicy("never").hold()
            key = endpoint.register(policy)
            async with client_of(endpoint, key) as client:
                asked = asyncio.create_task(ask(client, user("Hello")))
                await policy.begun.wait()
                endpoint.forget(key)
                with pytest.raises(openai.AuthenticationError, match="its episode has ended"):
                    await asked

    run(play())


def test_the_server_ends_while_a_turn_is_sampled():
    async def play():
        async with serving() as endpoint:
            policy = ScriptedPolicy("never").hold()
            async with client_of(endpoint, endpoint.register(policy), max_retries=0) as client:
                asked = asyncio.create_task(ask(client, user("Hello")))
                await policy.begun.wait()
                await endpoint.aclose()
                with pytest.raises(openai.AuthenticationError):
                    await asked
                with pytest.raises(openai.APIConnectionError):
                    await ask(client, user("Hello"))

    run(play())


def test_signals_stay_those_of_the_process():
    async def play():
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in numbers]
        async with playing("Hi.") as (_, client):
            await ask(client, user("Hello"))
            assert [signal.getsignal(number) for number in numbers] == before

    run(play())


def test_an_endpoint_that_no_agent_asked_for_closes():
    async def play():
        async with serving() as endpoint:
            endpoint.register(ScriptedPolicy())

    run(play())


def test_a_client_that_goes_away_gets_its_turn_when_it_asks_again():
    async def play():
        async with serving() as endpoint:
            policy = ScriptedPolicy("Hi.").hold()
            other = ScriptedPolicy("I am another.")
            key = endpoint.register(policy)
            async with client_of(endpoint, key) as client:
                asked = asyncio.create_task(ask(client, user("Hello")))
                await policy.begun.wait()
                asked.cancel()
                await asyncio.wait({asked})
            async with client_of(endpoint, endpoint.register(other)) as client:
                found = await ask(client, user("Hello"))
                assert found.choices[0].message.content == "I am another."
            async with client_of(endpoint, key) as client:
                while True:
                    policy.may_go.set()
                    try:
                        found = await ask(client, user("Hello"))
                        break
                    except openai.BadRequestError:  # the loss has not arrived yet
                        await asyncio.sleep(0)
            assert found.choices[0].message.content == "Hi."
            assert policy.turns == 1

    run(play())


def test_a_repeated_request_gets_the_turn_that_was_sent_and_not_received():
    async def play():
        async with playing("Hi.", "Bye.") as (policy, client):
            first = await ask(client, user("Hello"))
            again = {"x-stainless-retry-count": "1"}
            second = await ask(client, user("Hello"), extra_headers=again)
            assert second.choices[0] == first.choices[0]
            found = await ask(client, *policy.said, user("More"), extra_headers=again)
            assert found.choices[0].message.content == "Bye."
            with pytest.raises(openai.BadRequestError, match="the messages must begin with"):
                await ask(client, user("Hello"), extra_headers=again)
            assert policy.turns == 2

    run(play())


def test_a_second_request_beside_the_first_is_refused():
    async def play():
        async with playing("Hi.") as (policy, client):
            policy.hold()
            asked = asyncio.create_task(ask(client, user("Hello")))
            await policy.begun.wait()
            with pytest.raises(openai.BadRequestError, match="await a generate before the next"):
                await ask(client, user("Hello"))
            policy.may_go.set()
            assert (await asked).choices[0].message.content == "Hi."

    run(play())


def test_a_conversation_that_does_not_go_on_is_refused():
    async def play():
        async with playing("Hi.", "Bye.") as (policy, client):
            await ask(client, user("Hello"))
            for messages in (
                [user("Hello")],
                [user("Hello"), {"role": "assistant", "content": "Hm."}, user("More")],
                [user("Hullo"), {"role": "assistant", "content": "Hi."}, user("More")],
                [user("More")],
            ):
                with pytest.raises(openai.BadRequestError, match="the messages must begin with"):
                    await ask(client, *messages)
            found = await ask(client, *policy.said, user("More"))
            assert found.choices[0].message.content == "Bye."

    run(play())


def test_a_failure_of_the_policy_is_not_repeated():
    async def play():
        async with playing("no") as (policy, client):
            with pytest.raises(openai.InternalServerError, match="RuntimeError: the engine is gon"):
                await ask(client, user("fail"))
            assert policy.failures == 1

    run(play())


BAD_BODIES = [
    (b"", 400, "the body must be a JSON object: Expecting value"),
    (b"[1]", 400, "the body must be a JSON object, got [1]"),
    (b"\xff", 400, "the body must be a JSON object: 'utf-8' codec can't decode"),
    (b"[" * 100_000, 400, "the body must be a JSON object: maximum recursion depth"),
    (b'{"temperature": NaN}', 400, "NaN is no number of JSON"),
    (b'"%s"' % (b"x" * MOST_BODY_BYTES), 413, "at most 1,048,576 are taken"),
]


def test_a_body_that_is_no_request_is_refused():
    async def play():
        async with serving() as endpoint, httpx.AsyncClient() as client:
            headers = {"Authorization": f"Bearer {endpoint.register(ScriptedPolicy())}"}
            url = f"{endpoint.base_url}/chat/completions"
            for body, status, message in BAD_BODIES:
                answer = await client.post(url, content=body, headers=headers)
                assert answer.status_code == status, body[:20]
                error = answer.json()["error"]
                assert message in error["message"]
                assert error["type"] == "invalid_request_error"

    run(play())


def test_a_body_in_pieces_is_read_and_one_that_stops_harms_no_other():
    async def play():
        async with serving() as endpoint, httpx.AsyncClient() as client:
            policy = ScriptedPolicy("Hi.")
            key = endpoint.register(policy)
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{endpoint.base_url}/chat/completions"
            body = json.dumps({"model": "m", "messages": [user("Hello")]}).encode()
            arrived = asyncio.Event()

            async def stops():
                yield body[:9]
                arrived.set()
                await asyncio.Event().wait()

            async def pieces():
                for place in range(0, len(body), 9):
                    yield body[place : place + 9]

            stopped = asyncio.create_task(client.post(url, content=stops(), headers=headers))
            await arrived.wait()
            stopped.cancel()
            await asyncio.wait({stopped})
            answer = await client.post(url, content=pieces(), headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == "Hi."
            assert policy.turns == 1

    run(play())


def test_what_is_not_served_is_named():
    async def play():
        async with serving() as endpoint, httpx.AsyncClient() as client:
            for method, path, status in (
                ("POST", "completions", 404),
                ("POST", "responses", 404),
                ("GET", "chat/completions", 405),
            ):
                answer = await client.request(method, f"{endpoint.base_url}/{path}")
                assert answer.status_code == status
                message = answer.json()["error"]["message"]
                assert f"{method} /v1/{path} is not served" in message

    run(play())


def test_the_libraries_of_the_server_are_imported_when_an_agent_asks_for_its_address():
    program = (
        "import sys, rollout_worker.environments.openai_endpoint.endpoint as e\n"
        "e.OpenAIEndpoint()\n"
        "print([name for name in ('starlette', 'uvicorn', 'jsonschema') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
