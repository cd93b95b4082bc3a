"""Episodes of environments that verifiers has, or whose classes it has, in processes of a run."""

import builtins
import contextlib
import json
import signal

import pytest

from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.environments.adapters.parameter_checks import BadAdapter
from rollout_worker.environments.adapters.verifiers_environment import (
    VerifiersEnvironment,
    _loaded,
)
from rollout_worker.environments.environment_pool import (
    EnvironmentFailed,
    EnvironmentPool,
)
from rollout_worker.environments.turn_values import Said
from tests.deadlines import HANG_S
from tests.rollout_worker.environments.test_environment_pool import REWARD, heard

pytest.importorskip("verifiers.legacy")
pytestmark = pytest.mark.slow  # each process takes seconds to import the package

NAME = "rollout_worker.environments.adapters.verifiers_environment:VerifiersEnvironment"
KINDS = "tests.rollout_worker.environments.adapters.verifiers_kinds"
OWN = "verifiers.legacy.envs.integrations.reasoninggym_env:ReasoningGymEnv"
ROW = {"question": "Guess 1 to 9.", "answer": "7"}


def configured(env_id, **params):
    params = {"env_id": env_id} | params
    return EnvironmentConfig(name=NAME, params=params, timeout_s=HANG_S)


@contextlib.contextmanager
def running(env_id, **params):
    pool = EnvironmentPool(configured(env_id, **params), REWARD)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def guessing():
    with running(f"{KINDS}:guessing", env_args={"system_prompt": "Play."}) as pool:
        yield pool


def test_a_single_turn_of_the_package_is_scored_by_its_rubric():
    args = {"gym": "chain_sum", "num_train_examples": 4, "num_eval_examples": 1, "seed": 3}
    from verifiers.legacy.envs.integrations.reasoninggym_env import ReasoningGymEnv

    env = ReasoningGymEnv(**args)
    row = json.loads(json.dumps(env.get_dataset()[2]))
    right = env.rg_dataset[2]["answer"]
    with running(OWN, env_args=args) as pool:
        begun, over = heard(pool, [f"<answer>{right}</answer>"], row)
        assert begun.messages == [
            {key: message[key] for key in ("role", "content")} for message in row["prompt"]
        ]
        assert (over.messages, over.reward, over.done) == ([], 1.0, True)
        assert over.numbers["check_answer_reward_func"] == 1.0
        [_, over] = heard(pool, ["<answer>x</answer>"], row)
        assert (over.reward, over.done) == (0.0, True)


def test_turns_alternate_until_a_stop_condition_of_the_environment(guessing):
    begun, low, high, over = heard(guessing, ["3", "9", "7"], ROW)
    assert begun.messages == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Guess 1 to 9."},
    ]
    assert [turn.messages for turn in (low, high)] == [
        [{"role": "user", "content": "higher"}],
        [{"role": "user", "content": "lower"}],
    ]
    assert [turn.reward for turn in (low, high, over)] == [0.0, 0.0, 1.0]
    assert (over.messages, over.done) == ([], True)
    assert over.numbers == {"right": 1.0, "length": 5.0, "num_turns": 3.0}
    [again] = heard(guessing, [], {"prompt": ROW["question"], "answer": "7"})
    assert again.messages == begun.messages


def test_the_turns_of_the_environment_and_its_last_word_end_an_episode(guessing):
    *_, over = heard(guessing, ["1"] * 4, ROW)
    assert (over.reward, over.done, over.numbers["num_turns"]) == (0.0, True, 4.0)
    *_, over = heard(guessing, ["1", "give up"], ROW)
    assert (over.done, over.numbers["length"]) == (True, 4.0), "its last word is of the completion"


def test_episodes_of_one_process_do_not_mix(guessing):
    first, second = (guessing.begin_episode(ROW | {"answer": answer}, 1) for answer in ("7", "2"))
    for conversation in (first, second):
        conversation.call.result(HANG_S)
        conversation.answer()
        conversation.say(Said("7"))
    assert first.call.result(HANG_S) and first.answer().done
    assert second.call.result(HANG_S) and not second.answer().done
    second.end()


def test_what_fails_ends_the_episode_with_an_error(guessing):
    with pytest.raises(EnvironmentFailed, match="step 1: .*ToolCallError.*the table fell over"):
        heard(guessing, ["raise"], ROW)
    with pytest.raises(EnvironmentFailed, match="reset: .* neither prompt nor question"):
        heard(guessing, [], {"answer": "7"})
    with pytest.raises(EnvironmentFailed, match="reset: .* info.tool_defs"):
        heard(guessing, [], ROW | {"info": {"tool_defs": []}})


def test_a_conversation_that_does_not_only_grow_ends_with_an_error():
    with (
        running(f"{KINDS}:guessing", env_args={"kind": "Forgetful"}) as pool,
        pytest.raises(EnvironmentFailed, match="step 1: .*ModelError.*must begin with the 2"),
    ):
        heard(pool, ["3"], ROW)


def test_tools_of_the_environment_are_offered_and_called():
    def call(**arguments):
        return f"<tool_call>{json.dumps({'name': 'price', 'arguments': arguments})}</tool_call>"

    with running(f"{KINDS}:shop") as pool:
        [schema] = [one["function"] for one in pool.tools]
        assert schema["name"] == "price" and set(schema["parameters"]["properties"]) == {
            "item",
            "count",
        }
        two = call(item="tea", count=2) + call(item="milk")
        turns = [two, call(item="coffee"), call(count=2), "It costs 7."]
        _, answered, failed, lacking, over = heard(pool, turns, ROW)
        assert answered.messages == [
            {"role": "tool", "content": "6"},
            {"role": "tool", "content": "1"},
        ]
        assert failed.messages == [{"role": "tool", "content": "'coffee'"}]
        assert "missing 1 required positional argument" in lacking.messages[0]["content"]
        assert (over.reward, over.done, over.numbers["price_calls"]) == (1.0, True, 4.0)
        [_, over] = heard(pool, ["<tool_call>{</tool_call>"], ROW)
        assert (over.reward, over.done) == (0.0, True), "what is no call is an answer"


@pytest.mark.parametrize(
    ("env_id", "params", "message"),
    [
        ("no-such-environment", {}, "cannot load env_id='no-such-environment'.*is installed"),
        (f"{KINDS}:gessing", {}, "nearest: 'guessing'"),
        (f"{KINDS}:price", {"env_args": {"item": "tea"}}, "must be an environment of .* got int"),
        (f"{KINDS}:guessing", {"env_args": {"knd": "x"}}, "cannot load .*argument 'knd'"),
        (f"{KINDS}:guessing", {"env_args": {"group": True}}, "compares the completions of a group"),
        (f"{KINDS}:guessing", {"env_args": 3}, "env_args=3 cannot be: .* a valid dictionary"),
        (
            f"{KINDS}:guessing",
            {"call_format": "lama"},
            "'lama' cannot be: .*'hermes' or 'llama'",
        ),
    ],
)
def test_parameters_that_break_a_rule_are_refused(env_id, params, message):
    with pytest.raises(ValueError, match=message):
        VerifiersEnvironment(env_id, **params)


def test_the_handlers_of_signals_stay_those_of_the_process():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    VerifiersEnvironment(f"{KINDS}:guessing")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_it_needs_its_package_and_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **named):
        if name == "verifiers.legacy":
            raise ModuleNotFoundError("No module named 'verifiers.legacy'")
        return real(name, *arguments, **named)

    _loaded.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadAdapter, match=r"pip install '.\[verifiers\]'"):
        VerifiersEnvironment("any")
