"""Environments in their processes: what each bad one becomes, and what a lost process costs."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal

import pytest

from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.config.reward_config import RewardConfig, RewardFunctionConfig
from rollout_worker.environments.environment_pool import (
    EnvironmentFailed,
    EnvironmentPool,
    validate_environment,
)
from rollout_worker.environments.turn_values import Said
from tests.deadlines import HANG_S, wait_until

KINDS = "tests.rollout_worker.environments.kinds"
REWARD = RewardConfig(functions=(RewardFunctionConfig(name="environment"),))


def configured(kind, *, timeout_s=HANG_S, **changes):
    return EnvironmentConfig(name=f"{KINDS}:{kind}", timeout_s=timeout_s, **changes)


def make_pool(kind, *, reward=REWARD, **changes):
    return EnvironmentPool(configured(kind, **changes), reward)


def answer(conversation):
    concurrent.futures.wait([conversation.call], HANG_S)
    return conversation.answer()


def heard(pool, texts, item=None, seed=1):
    """What an episode answers to these messages, in their order."""
    conversation = pool.begin_episode({} if item is None else item, seed)
    turns = [answer(conversation)]
    for text in texts:
        conversation.say(Said(text))
        turns.append(answer(conversation))
    return turns


@pytest.fixture(scope="module")
def guessing():
    pool = make_pool("Guessing", params={"most": 50})
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def bad():
    pool = make_pool("Bad", memory_gb=2.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def hasty():
    """As `bad`, with a time limit that those reach which never answer."""
    pool = make_pool("Bad", timeout_s=1.0)
    yield pool
    pool.close()


def test_an_episode_goes_turn_by_turn(guessing):
    begun, low, high, right = heard(guessing, ["3", "9", "7"], {"secret": 7})
    assert begun.messages == [{"role": "user", "content": "Guess."}]
    assert [turn.messages[0]["content"] for turn in (low, high)] == ["higher", "lower"]
    assert [turn.reward for turn in (low, high, right)] == [0.0, 0.0, 1.0]
    assert [turn.done for turn in (begun, low, high, right)] == [False, False, False, True]


def test_the_seed_decides_the_game_and_episodes_do_not_mix(guessing):
    conversations = [guessing.begin_episode({}, seed) for seed in (1, 0, 1)]  # 9, 25, 9
    answers = [[answer(conversation)] for conversation in conversations]
    for guess in ("10", "20", "30", "40"):
        for conversation in conversations:
            conversation.say(Said(guess))
        for conversation, its in zip(conversations, answers, strict=True):
            its.append(answer(conversation))
    assert answers[0] == answers[2] != answers[1]


FAULTS = {
    "reset raises": "reset: ValueError: no game today",
    "reset returns a text": "reset: what reset returns must be a list of messages .* str 'Guess.'",
    "raises": "step 1: ValueError: the table fell over",
    "exits": "step 1: SystemExit: 4",
    "dies": "step 1: child was killed by SIGKILL",
    "returns a text": "step 1: step must return a tuple of observation, reward, done, info",
    "observation is a text": "step 1: the observation must be a list of messages .* str 'higher'",
    "observation is empty": "step 1: the observation must be a list of messages",
    "speaks for the model": "step 1: the observation .* the role 'assistant'",
    "reward is nan": "step 1: the reward must be finite, got nan",
    "reward is none": "step 1: the reward must be a number, got NoneType",
    "reward is huge": r"step 1: a reward must lie between -1e\+06 and 1e\+06, got 1e\+300",
    "done is a text": "step 1: done must be true or false, got str 'no'",
    "says 10 mb": "step 1: the observation has 10,000,033 bytes, at most 1,048,576",
    "takes memory": "step 1: MemoryError",
    "half a surrogate": "step 1: the observation has a lone surrogate",
}


@pytest.mark.parametrize("does", FAULTS)
def test_bad_environment_ends_its_episode_with_an_error(bad, does):
    with pytest.raises(EnvironmentFailed, match=FAULTS[does]):
        heard(bad, ["3"], {"does": does})
    score = bad.score_of(0.0, "step 1: it fell over", {})
    assert score.error == "environment_error: step 1: it fell over" and score.rewards == {}


@pytest.mark.parametrize("does", ["waits", "blocks"])
def test_environment_that_never_answers_ends_its_episode_with_an_error(hasty, does):
    conversation = hasty.begin_episode({"does": does}, 1)
    answer(conversation)
    conversation.say(Said("3"))
    with pytest.raises(EnvironmentFailed, match="step 1: no result within 1 s"):
        answer(conversation)


@pytest.mark.parametrize("does", ["prints much", "forks"])
def test_environment_that_prints_or_forks_goes_on(bad, does):
    assert heard(bad, ["3"], {"does": does})[-1].done


def test_an_observation_within_its_bound_is_taken_in_any_alphabet(bad):
    [_, said] = heard(bad, ["3"], {"does": "says 1 mb of chinese"})
    assert said.messages == [{"role": "user", "content": "\u4f60" * 349_000}]


def test_step_may_return_an_object(bad):
    turn = heard(bad, ["3"], {"does": "an object"})[-1]
    assert (turn.messages[0]["content"], turn.reward, turn.done) == ("higher", 0.5, False)


@contextlib.contextmanager
def recording(path, kind="Recording", **changes):
    """A pool whose process writes its calls into a file, and two episodes that have begun."""
    pool = make_pool(kind, params={"path": str(path)}, **changes)
    try:
        both = [pool.begin_episode({"secret": 5}, 1) for _ in range(2)]
        for each in both:
            answer(each)
        yield both
    finally:
        pool.close()


def test_an_episode_survives_the_loss_of_its_process_by_another_one(tmp_path):
    path = tmp_path / "calls"
    with recording(path) as (one, other):
        one.say(Said("3"))
        answer(one)
        other.say(Said("die"))  # alone, so it is tried twice
        with pytest.raises(EnvironmentFailed, match="step 1: child exited with code 3"):
            answer(other)
        one.say(Said("9"))
        assert answer(one).messages[0]["content"] == "lower"
        one.say(Said("5"))
        assert answer(one).done
    calls = [line.split() for line in path.read_text().splitlines()]
    first, last = calls[0][0], calls[-1][0]
    assert first != last
    played = [what for pid, what in calls if pid == last]
    assert played == ["close", "reset", "3", "9", "5", "close"], "the first had no episode"


def test_calls_in_flight_beside_the_one_that_kills_are_answered(tmp_path):
    with recording(tmp_path / "calls", timeout_s=2.0) as (waiting, killing):
        waiting.say(Said("wait"))
        killing.say(Said("die"))
        with pytest.raises(EnvironmentFailed, match="child exited with code 3"):
            answer(killing)
        with pytest.raises(EnvironmentFailed, match="no result within 2 s"):
            answer(waiting)


def test_environment_that_goes_another_way_when_played_again_ends_with_an_error(tmp_path):
    path = tmp_path / "calls"
    with recording(path, "Unsteady") as (one, _):
        one.say(Said("3"))
        answer(one)
        os.kill(int(path.read_text().split()[0]), signal.SIGKILL)
        one.say(Said("4"))
        with pytest.raises(EnvironmentFailed, match=r"step 2: .* played again, answer 1 "):
            answer(one)


def test_an_environment_that_exits_at_its_close_ends_no_episode():
    pool = make_pool("ExitsAtClose")
    try:
        other = pool.begin_episode({"secret": 5}, 1)
        answer(other)
        assert heard(pool, ["5"], {"secret": 5})[-1].reward == 1.0
        other.say(Said("5"))
        assert answer(other).reward == 1.0
    finally:
        pool.close()


@pytest.mark.parametrize("beside", [True, False])
def test_a_close_that_blocks_costs_no_episode_its_reward(beside):
    pool = make_pool("BlocksAtClose", timeout_s=5.0)
    try:
        other = pool.begin_episode({"secret": 5}, 1)
        answer(other)
        first = pool.begin_episode({"secret": 5}, 1)
        answer(first)
        first.say(Said("5"))
        if beside:
            other.say(Said("4"))
        assert answer(first).reward == 1.0
        if not beside:
            other.say(Said("4"))  # alone in a process that does not answer
        assert not answer(other).done
        other.say(Said("5"))
        assert answer(other).reward == 1.0
    finally:
        pool.close()


def test_episode_that_the_worker_ends_is_closed(tmp_path):
    path = tmp_path / "calls"
    with recording(path) as (one, other):
        one.end()
        one.end()
        other.say(Said("4"))  # answered after the end of the first
        answer(other)
        other.say(Said("5"))
        answer(other)
    closed = [line.split()[1] for line in path.read_text().splitlines()].count("close")
    assert closed == 3, "two episodes, and the one that was made to see its tools"


def test_a_pool_that_closes_does_not_wait_for_episodes_that_were_ended(tmp_path):
    path = tmp_path / "calls"
    with recording(path, timeout_s=20.0) as (one, _):
        one.say(Said("wait"))
        wait_until(lambda: "wait" in path.read_text(), "the environment to wait")
        one.end()
    assert one.call.result(0).errors == {f"{KINDS}:Recording": "its episode was ended meanwhile"}


def test_the_call_of_an_episode_that_the_worker_ends_is_cancelled(tmp_path):
    path = tmp_path / "calls"
    with recording(path, timeout_s=5.0) as (one, other):
        one.say(Said("wait"))
        one.end()
        found = one.call.result(HANG_S)
        other.say(Said("4"))  # its lane is free of the other's call
        answer(other)
    assert found.errors == {f"{KINDS}:Recording": "its episode was ended meanwhile"}
    called = [line.split()[1] for line in path.read_text().splitlines()]
    assert called.index("wait") < called.index("cancelled") < called.index("close", 1)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (f"{KINDS}:Gessing", {}, "nearest: 'Guessing'"),
        (f"{KINDS}:NoStep", {}, "needs `async def step`"),
        (f"{KINDS}:PlainStep", {}, "needs `async def step`"),
        (f"{KINDS}:NoSeed", {}, r"called as reset\(item, seed\): too many positional arguments"),
        (f"{KINDS}:TwoMessages", {}, r"called as step\(message\): missing .* 'last'"),
        (f"{KINDS}:NOT_A_CLASS", {}, "must be a class, or an .* got int"),
        (f"{KINDS}:Guessing", {"mst": 3}, "nearest: 'most'"),
        ("no_such_folder/game.py:Game", {}, "does not exist"),
        ("Guessing", {}, r"must be package.module:Class, or a file"),
        ("no_such_package:Game", {}, "cannot import 'no_such_package'"),
        ("builtins:dict", {}, "environment 'builtins:dict' cannot be made: no signature"),
    ],
)
def test_environment_that_cannot_be_used_is_refused_before_the_run(name, params, message):
    with pytest.raises(ValueError, match=message):
        validate_environment(EnvironmentConfig(name=name, params=params), REWARD)


def test_an_environment_whose_close_hangs_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr("rollout_worker.environments.environment_pool.START_TIMEOUT_S", 5)
    hangs = (
        "environment process: .* while loading environment '.*': .*made for its tools and closed"
    )
    with pytest.raises(RuntimeError, match=hangs):
        validate_environment(configured("NeverCloses"), REWARD)


def test_environment_may_be_a_file():
    path = pathlib.Path(__file__).with_name("kinds.py")
    validate_environment(EnvironmentConfig(name=f"{path}:Guessing"), REWARD)
    validate_environment(
        EnvironmentConfig(name=f"{path.relative_to(pathlib.Path.cwd())}:Guessing"), REWARD
    )


def test_total_of_an_episode_is_weighed_as_any_reward():
    weighed = RewardConfig(functions=(RewardFunctionConfig(name="environment", weight=0.5),))
    pool = make_pool("Guessing", reward=weighed)
    pool.close()
    assert pool.score_of(3.0, "", {}).total == 1.5
    assert pool.score_of(3.0, "", {}).rewards == {"environment": 3.0}
    counted = pool.score_of(3.0, "", {"calls": 2.0})
    assert counted.rewards == {"environment": 3.0, "environment/calls": 2.0}
    assert counted.total == 1.5 and pool.score_of(3.0, "it fell", {"calls": 2.0}).rewards == {}
    many = [pool.score_of(3.0, "", {f"of item {n}": 1.0}).rewards for n in range(100)]
    assert sum(len(rewards) for rewards in many) == 100 + 63, "the first 64 names, for good"


def test_the_numbers_of_info_are_summed_over_an_episode(bad):
    conversation = bad.begin_episode({"does": "counts"}, 1)
    answer(conversation)
    for turn in range(3):
        conversation.say(Said("3"))
        assert answer(conversation).numbers == {"calls": 2.0, "share": 0.5}
        assert conversation.numbers == {"calls": 2.0 * (turn + 1), "share": 0.5 * (turn + 1)}
