"""Policies that say what they are told to, and clients of the endpoint that serves them."""

import asyncio
import contextlib
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rollout_worker.environments.openai_endpoint.endpoint import OpenAIEndpoint
from rollout_worker.environments.tools.function_schemas import schemas_of
from rollout_worker.environments.turn_values import BadTurn, SampledTurn
from tests.deadlines import HANG_S

STOP = 0
"""Token id of the end of a turn; every other token is a character."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


TOOLS = schemas_of([add])


def call(a, b):
    """What the model writes to call `add`."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def user(text) -> Any:
    return {"role": "user", "content": text}


class ScriptedPolicy:
    """Says its texts in their order, to conversations that go on."""

    def __init__(self, *texts, tools=(), finish_reason="stop"):
        self.tools = tuple(tools)
        self.said: list[Any] = []
        """The conversation."""
        self.max_tokens: list[int | None] = []
        """Of each turn."""
        self.failures = 0
        self.may_go = asyncio.Event()
        """Turns wait for it; set unless `holds`."""
        self.may_go.set()
        self.begun = asyncio.Event()
        """Set when a turn is asked for."""
        self._texts = list(texts)
        self._finish_reason = finish_reason
        self._is_busy = False

    @property
    def turns(self):
        """Turns that were begun."""
        return len(self.max_tokens)

    def hold(self):
        """Keeps the next turns until `may_go`."""
        self.may_go.clear()
        return self

    async def generate(self, messages, *, max_tokens=None):
        if self._is_busy:
            raise BadTurn("await a generate before the next")
        if list(messages[: len(self.said)]) != self.said or len(messages) == len(self.said):
            raise BadTurn(f"the messages must begin with {self.said}, got {messages}")
        if messages[-1]["content"] == "fail":
            self.failures += 1
            raise RuntimeError("the engine is gone")
        self._is_busy = True
        self.max_tokens.append(max_tokens)
        self.begun.set()
        try:
            await self.may_go.wait()
        finally:
            self._is_busy = False
        text = self._texts.pop(0)
        prompt = "".join(message["content"] for message in messages)
        self.said = [*messages, {"role": "assistant", "content": text}]
        ids = [*map(ord, text), STOP]
        logprobs = [-0.5 - place for place in range(len(ids))]
        return SampledTurn(text, ids, logprobs, self._finish_reason, list(map(ord, prompt)))


def run(coroutine):
    """Runs a test's coroutine."""
    return asyncio.run(asyncio.wait_for(coroutine, HANG_S))


@contextlib.asynccontextmanager
async def serving(**options):
    endpoint = OpenAIEndpoint(**options)
    try:
        yield endpoint
    finally:
        await endpoint.aclose()


def client_of(endpoint, api_key, **options):
    # Certificates take most of the time that it takes to make one.
    http_client = DefaultAsyncHttpxClient(verify=False)
    url = endpoint.base_url
    return AsyncOpenAI(base_url=url, api_key=api_key, http_client=http_client, **options)


@contextlib.asynccontextmanager
async def playing(*texts, tools=(), finish_reason="stop", **options):
    """A policy that says these texts, and a client that asks it."""
    policy = ScriptedPolicy(*texts, tools=tools, finish_reason=finish_reason)
    async with (
        serving(**options) as endpoint,
        client_of(endpoint, endpoint.register(policy)) as client,
    ):
        yield policy, client


async def ask(client, *messages, **fields):
    return await client.chat.completions.create(model="any", messages=list(messages), **fields)
