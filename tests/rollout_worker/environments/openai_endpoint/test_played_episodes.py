"""Agents of the client as environments: the one that is documented, and one played again."""

import asyncio
import importlib.util
import pathlib
import re

import httpx
import pytest

from rollout_worker.environments.rollout_function import FunctionEnvironment
from rollout_worker.environments.tools.function_schemas import schemas_of
from rollout_worker.environments.turn_values import Said
from tests.rollout_worker.environments.openai_endpoint.scripted import run, serving

DOCUMENT = pathlib.Path(__file__).resolve().parents[4] / "docs/openai_agents.md"
CALL = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
ITEM = {"question": "What is tea?", "answer": "3"}
TURNS = [
    Said(CALL, [5, 6], [1, 2], [-0.5, -0.25], "stop"),
    Said("3", [7], [3, 2], [-0.125, -0.75], "stop"),
]


@pytest.fixture
def agent(tmp_path):
    """The module that the document shows."""
    (text,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "agent.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("documented_agent", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment_of(agent, endpoint):
    return FunctionEnvironment(agent.rollout, {}, schemas_of(agent.rollout.tools), endpoint)


def test_the_agent_of_the_document_is_an_environment_that_says_the_same_again(agent):
    async def play():
        async with serving() as endpoint:
            played = []
            for _ in range(2):
                environment = environment_of(agent, endpoint)
                begun = await environment.reset(ITEM, 1)
                played.append([begun, *[await environment.say(said) for said in TURNS]])
            (begun, answered, over), again = played
            assert again == played[0]
            assert begun.messages == [{"role": "user", "content": "What is tea?"}]
            assert answered.messages == [
                {"role": "tool", "content": "3", "tool_call_id": "call00000"}
            ]
            assert (over.reward, over.done) == (1.0, True)

    run(play())


def test_an_agent_that_is_cancelled_leaves_no_other_without_its_turn(agent):
    async def play():
        async with serving() as endpoint:
            cut, other = (environment_of(agent, endpoint) for _ in range(2))
            await asyncio.gather(cut.reset(ITEM, 1), other.reset(ITEM, 1))
            cut.close()
            turns = [await other.say(said) for said in TURNS]
            assert [turn.done for turn in turns] == [False, True]

    run(play())


@pytest.mark.parametrize("ends", [True, False])
def test_the_key_of_an_episode_is_refused_after_it(ends):
    """Whether its function returns, or is cancelled."""
    keys = []

    async def rollout(policy, item):
        keys.append(policy.api_key)
        await policy.generate([{"role": "user", "content": "Guess."}])
        return 1.0

    async def play():
        async with serving() as endpoint, httpx.AsyncClient() as client:
            environment = FunctionEnvironment(rollout, {}, (), endpoint)
            await environment.reset(ITEM, 1)
            headers = {"Authorization": f"Bearer {keys[0]}"}
            answers = []
            answers.append(await client.get(f"{endpoint.base_url}/models", headers=headers))
            if ends:
                assert (await environment.say(TURNS[1])).done
            environment.close()
            answers.append(await client.get(f"{endpoint.base_url}/models", headers=headers))
            assert [one.status_code for one in answers] == [200, 401]

    run(play())
