"""Async functions that ask the policy for its turns: token for token, and what bad ones become."""

import json

import numpy as np
import pytest

from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.environments.environment_pool import (
    EnvironmentFailed,
    EnvironmentPool,
    validate_environment,
)
from rollout_worker.environments.turn_values import Said
from services.wire.messages import FinishReason
from tests.deadlines import HANG_S
from tests.rollout_worker.environments.test_environment_pool import REWARD, answer
from tests.rollout_worker.environments.test_episodes import essence, make_core, played, policy

__all__ = ["policy"]
AGENTS = "tests.rollout_worker.environments.agents"


def make_pool(agent, **params):
    config = EnvironmentConfig(name=f"{AGENTS}:{agent}", params=params, timeout_s=HANG_S)
    return EnvironmentPool(config, REWARD)


@pytest.fixture(scope="module")
def bad():
    pool = make_pool("bad")
    yield pool
    pool.close()


FAULTS = {
    "never asks": "reset: the rollout ended without a generate",
    "asks nothing": "reset: what generate is asked for must be a list of messages",
    "asks a text": "reset: what generate is asked for must be a list, .* got 'Guess.'",
    "asks for no tokens": "reset: max_tokens must be a whole number of at least 1, got 0",
    "asks for the model": "reset: .* the role 'assistant', which is the model's own",
    "asks for half a token": "reset: what generate is asked for holds neither messages nor token",
    "asks for a token below 0": r"neither messages nor token ids: \[5, -1\]",
    "asks for a token beyond all": r"neither messages nor token ids: \[5, 2147483648\]",
    "asks for a million tokens": "adds 1,000,000 token ids of 3,000,000 bytes, at most 1,048,576",
    "asks twice at once": "(reset|step 1): an episode is one conversation: await a generate",
    "changes the past": r"step 1: the messages must begin with the 2 .* message 0 was .*Guess\.",
    "changes what was said": "step 1: the messages must begin .* message 1 was .*'9'.*'another'",
    "asks again": "step 1: the messages must begin with the 2 .* message 1 was .* got nothing",
    "says nothing": "step 1: the messages must begin with the 2 .* and go on, got these alone: put",
    "speaks for the model later": "step 1: .* behind the 2 messages so far must .* 'assistant'",
    "changes a call": "step 1: the messages must begin .* message 1 was .*'tea'.*got .*'milk'",
    "turns to token ids": "step 1: an episode asks either by messages or by token ids",
    "drops token ids": "step 1: the token ids must begin with the 4 of this episode so far",
    "gives up": "step [12]: no generate can follow one that was cancelled",
    "raises": "step 1: ValueError: the table fell over",
    "exits": "step 1: SystemExit: 4",
    "is interrupted": "step 1: KeyboardInterrupt",
    "reads its address in a thread": "reset: RuntimeError: policy.base_url is read outside the ev",
    "returns a text": "step 1: the reward must be a number, got str",
    "returns a nan": "step 1: the reward must be finite, got nan",
    "returns nothing": "step 1: the reward must be a number, got NoneType",
}


@pytest.mark.parametrize("does", FAULTS)
def test_a_bad_agent_ends_its_episode_with_an_error(bad, does):
    conversation = bad.begin_episode({"does": does}, 1)
    with pytest.raises(EnvironmentFailed, match=FAULTS[does]):
        for _ in range(3):
            answer(conversation)
            conversation.say(Said("9", [3, 4], [9, 2], [-0.5, -0.25]))


def test_a_turn_may_be_asked_for_all_tokens_there_are(bad):
    turn = answer(bad.begin_episode({"does": "asks for all there is"}, 1))
    assert turn.max_tokens == 2**31 - 1


@pytest.mark.parametrize("does", ["ends well", "corrects itself"])
def test_what_it_returns_is_the_reward(bad, does):
    conversation = bad.begin_episode({"does": does}, 1)
    assert answer(conversation).messages == [{"role": "user", "content": "Guess."}]
    conversation.say(Said("9", [3, 4], [9, 2], [-0.5, -0.25]))
    over = answer(conversation)
    assert (over.reward, over.done, over.numbers) == (0.5, True, {"turns": 1.0})


@pytest.mark.parametrize(("anew", "read"), [(False, [3, 4, 9, 2, 7]), (True, [7])])
def test_it_is_told_what_a_turn_read_also_where_earlier_ones_are_written_anew(bad, anew, read):
    conversation = bad.begin_episode({"does": "tells what it read"}, 1)
    answer(conversation)
    conversation.say(Said("9", [3, 4], [9, 2], [-0.5, -0.25]))
    answer(conversation)
    conversation.say(Said("8", [7], [8, 2], [-0.5, -0.25], "stop", anew))
    numbers = answer(conversation).numbers
    assert numbers == {f"token {place}": float(token) for place, token in enumerate(read)}


def test_messages_that_it_began_with_may_hold_calls(bad):
    conversation = bad.begin_episode({"does": "shows a call"}, 1)
    assert answer(conversation).messages[1]["content"] == ""
    conversation.say(Said("9", [3, 4], [9, 2], [-0.5, -0.25]))
    assert answer(conversation).messages == [{"role": "user", "content": "Sure?"}]


def test_an_agent_whose_process_dies_is_played_again(tmp_path):
    pool = make_pool("dies_once", mark=str(tmp_path / "died"))
    try:
        conversation = pool.begin_episode({}, 1)
        answer(conversation)
        conversation.say(Said("9", [3], [9, 2], [-0.5, -0.25]))
        assert answer(conversation).messages == [{"role": "user", "content": "Sure?"}]
        conversation.say(Said("8", [4], [8, 2], [-0.5, -0.25]))
        assert answer(conversation).done
    finally:
        pool.close()
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize(
    ("agent", "params", "message"),
    [
        ("plain", {}, r"must be a class, or an `async def rollout\(policy, item\)`, got function"),
        ("lacks_the_item", {}, "cannot be called with params={} behind policy and item: too many"),
        ("revises", {"trys": 3}, r"nearest: 'tries'.*it takes \['tries', 'log'\]"),
        ("miscalls", {}, "call_format must be one of .'hermes', 'llama'., got 'hermess'"),
        ("reviser", {}, "nearest: 'revises'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_run(agent, params, message):
    with pytest.raises(ValueError, match=message):
        validate_environment(EnvironmentConfig(name=f"{AGENTS}:{agent}", params=params), REWARD)


def test_the_tools_of_a_function_are_offered():
    [schema] = validate_environment(EnvironmentConfig(name=f"{AGENTS}:pays"), REWARD)
    assert schema["function"]["name"] == "price"


def turns_of(group, completion):
    """The turns of a record: what each was sampled after, its ids and logprobs."""
    whole = np.concatenate([group.prompt_token_ids, completion.token_ids]).tolist()
    lengths = completion.segment_tokens or (len(completion.token_ids),)
    start, logprobs, turns = len(group.prompt_token_ids), completion.behavior_logprobs.tolist(), []
    for place, length in enumerate(lengths):
        if place % 2 == 0:
            own, logprobs = logprobs[:length], logprobs[length:]
            turns.append((whole[:start], whole[start : start + length], own))
        start += length
    return turns


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["revises", "by_ids", "by_openai"])
def test_an_agent_is_given_exactly_what_is_trained(policy, agent, tmp_path, request):
    log = tmp_path / "turns"
    says = {"says": 0.9} if agent == "by_openai" else {}
    core = make_core(policy, agent, module=AGENTS, temperature=0.9, log=str(log), **says)
    try:
        groups = played(core, (0, 1))
        log.rename(tmp_path / "first")
        again = played(core, (0, 1))
    finally:
        core.close()
    assert [essence(group) for group in groups] == [essence(group) for group in again]
    given = [
        [
            (turn["prompt_token_ids"], turn["token_ids"], turn["logprobs"])
            for turn in json.loads(line)
        ]
        for line in (tmp_path / "first").read_text().splitlines()
    ]
    done = [
        turns_of(group, completion)
        for group in groups
        for completion in group.completions
        if completion.finish_reason is FinishReason.STOP
    ]
    assert len(done) == 8 and sorted(given) == sorted(done)
    limits = [10, 9] if agent == "revises" else [6, 6, 6]
    for turns in done:
        pairs = zip(turns, limits, strict=True)
        assert all(len(ids) <= most for (_, ids, _), most in pairs)
    assert any(len(ids) == limits[0] for turns in done for _, ids, _ in turns), "none was cut off"
    rewards = {c.total_reward for group in groups for c in group.completions}
    assert rewards == {2.0} if agent == "revises" else len(rewards) == 2
