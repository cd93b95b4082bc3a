"""What a client gets of a turn: tokens, and the chunks of a stream."""

from tests.rollout_worker.environments.openai_endpoint.scripted import (
    STOP,
    TOOLS,
    ask,
    call,
    playing,
    run,
    user,
)


def test_tokens_are_returned_as_sampled():
    async def play():
        async with playing("Hi.") as (_, client):
            fields = {"return_token_ids": True}
            found = await ask(client, user("Hello"), logprobs=True, extra_body=fields)
            choice = found.choices[0]
            ids = [*map(ord, "Hi."), STOP]
            assert found.model_extra == {"prompt_token_ids": [*map(ord, "Hello")]}
            assert choice.model_extra == {"token_ids": ids}
            assert choice.logprobs is not None and choice.logprobs.content is not None
            tokens = choice.logprobs.content
            assert [one.logprob for one in tokens] == [-0.5, -1.5, -2.5, -3.5]
            assert [one.token for one in tokens] == [f"token_id:{token}" for token in ids]
            assert {(one.bytes, *one.top_logprobs) for one in tokens} == {(None,)}

    run(play())


def test_a_stream_adds_up_to_the_turn():
    async def play():
        async with playing("Hi.", "Bye.") as (policy, client):
            stream = await ask(client, user("Hello"), stream=True)
            chunks = [chunk async for chunk in stream]
            assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
            assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
            choices = [chunk.choices[0] for chunk in chunks]
            assert choices[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in choices) == "Hi."
            assert [choice.finish_reason for choice in choices] == [None, None, "stop"]
            assert {chunk.usage for chunk in chunks} == {None}
            async with client.chat.completions.stream(
                model="m", messages=[*policy.said, user("More")]
            ) as events:
                found = await events.get_final_completion()
            assert found.choices[0].message.content == "Bye."

    run(play())


def test_a_stream_has_tokens_and_usage_where_they_are_asked_for():
    async def play():
        async with playing("Hi.") as (_, client):
            stream = await ask(
                client,
                user("Hello"),
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].model_extra == {"prompt_token_ids": [*map(ord, "Hello")]}
            extras = [chunk.choices[0].model_extra or {} for chunk in chunks[:-1]]
            ids = [one for extra in extras for one in extra.get("token_ids", [])]
            assert ids == [*map(ord, "Hi."), STOP]
            logprobs = [chunk.choices[0].logprobs for chunk in chunks[:-1]]
            content = [one for found in logprobs if found for one in found.content or []]
            assert [one.logprob for one in content] == [-0.5, -1.5, -2.5, -3.5]
            assert chunks[-1].choices == []
            usage = [chunk.usage and chunk.usage.total_tokens for chunk in chunks]
            assert usage == [None, None, None, len("Hello") + len("Hi.") + 1]

    run(play())


def test_a_stream_of_calls_adds_up_to_them():
    async def play():
        text = f"I add.{call(1, 2)}{call(3, 4)}"
        async with playing(text, tools=TOOLS) as (_, client):
            async with client.chat.completions.stream(model="m", messages=[user("Add.")]) as events:
                found = await events.get_final_completion()
            message = found.choices[0].message
            assert message.content == "I add."
            calls = [one.function.arguments for one in message.tool_calls or []]
            assert calls == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
            assert found.choices[0].finish_reason == "tool_calls"

    run(play())


def test_a_stream_of_calls_alone_has_their_tokens():
    async def play():
        async with playing(call(1, 2), tools=TOOLS) as (_, client):
            fields = {"return_token_ids": True}
            stream = await ask(client, user("Add."), stream=True, extra_body=fields)
            choices = [chunk.choices[0] async for chunk in stream]
            assert [choice.delta.content for choice in choices] == [None] * 3
            ids = [(choice.model_extra or {}).get("token_ids") for choice in choices]
            assert ids == [None, [*map(ord, call(1, 2)), STOP], None]

    run(play())
