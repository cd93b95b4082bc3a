"""Episodes against a real OpenEnv server, played by the processes of a run."""

import builtins
import contextlib
import json
import random

import pytest

from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.environments.adapters.openenv_session import OpenEnvSession
from rollout_worker.environments.adapters.parameter_checks import BadAdapter
from rollout_worker.environments.environment_pool import EnvironmentFailed, EnvironmentPool
from rollout_worker.environments.turn_values import Said
from rollout_worker.rewards.scorers import BadScorer
from tests.deadlines import HANG_S
from tests.rollout_worker.environments.adapters.lost_processes import kill_children
from tests.rollout_worker.environments.test_environment_pool import REWARD, answer, heard

pytest.importorskip("openenv.core.env_server.http_server")

NAME = "rollout_worker.environments.adapters.openenv_session:OpenEnvSession"
SAYS = {"action": {"guess": "{text}"}, "describe": "{observation[text]}", "extract": "whole"}


@contextlib.contextmanager
def running(url, **params):
    config = EnvironmentConfig(name=NAME, params={"url": url} | params, timeout_s=HANG_S)
    pool = EnvironmentPool(config, REWARD)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def url():
    from tests.rollout_worker.environments.adapters.openenv_kinds import serving

    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def guessing(url):
    params = SAYS | {"reset_fields": ["secret"], "system_prompt": "Play."}
    with running(url, **params) as pool:
        yield pool


def contents(turns):
    return [message["content"] for turn in turns for message in turn.messages]


def test_an_episode_goes_turn_by_turn_with_the_rewards_of_its_steps(guessing):
    begun, low, high, over = heard(guessing, ["3", " 9", "7\n"], {"question": "Q?", "secret": 7})
    assert begun.messages == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Q?\n\nGuess."},
    ]
    assert contents([low, high, over]) == ["higher", "lower", "right"]
    assert [turn.reward for turn in (low, high, over)] == [-0.25, -0.25, 1.0]
    assert [turn.done for turn in (low, high, over)] == [False, False, True]
    assert over.numbers == {"invalid_actions": 0.0, "env_steps": 1.0}


def test_what_the_server_cannot_read_is_answered_and_bounded(guessing):
    _, wrong, low, again, over = heard(guessing, ["seven", "3", "?", ""], {"secret": 7})
    [said] = contents([wrong])
    assert said.startswith("That is no action: guess: Input should be a valid integer")
    assert [turn.numbers["invalid_actions"] for turn in (wrong, low, again)] == [1.0, 0.0, 1.0]
    assert (again.done, over.done, over.reward) == (False, True, 0.0)


def test_episodes_have_sessions_of_their_own(guessing):
    first, second = (guessing.begin_episode({"secret": secret}, 1) for secret in (7, 2))
    for conversation in (first, second):
        answer(conversation)
        conversation.say(Said("5"))
    assert contents([answer(first), answer(second)]) == ["higher", "lower"]
    first.end()
    second.end()


def test_the_seed_decides_what_the_environment_draws(url):
    with running(url, **SAYS) as pool:
        for seed in (3, 2**62 + 3):
            secret = random.Random(seed % 2**31).randint(1, 99)
            assert heard(pool, [str(secret)], {}, seed)[-1].reward == 1.0


def test_an_episode_goes_on_in_a_new_session_where_its_process_is_lost(url):
    with running(url, **SAYS | {"describe": "{observation}"}) as pool:
        conversation = pool.begin_episode({}, 3)
        answer(conversation)
        for guess in ("0", "100"):
            conversation.say(Said(guess))
            answer(conversation)
        kill_children()
        conversation.say(Said("-1"))
        [said] = contents([answer(conversation)])
    assert json.loads(said) == {"text": "higher", "guesses": [0, 100, -1]}


def test_actions_may_be_json_objects_after_the_marker(url):
    with running(url, reset_fields=["secret"]) as pool:
        right = json.dumps({"guess": 7, "note": "last"})
        texts = ["7", "#### 7", '#### {"guess"', "I try.\n#### " + right]
        begun, none, number, broken = heard(pool, texts[:3], {"secret": 7})
        *_, over = heard(pool, texts[3:], {"secret": 7})
    assert contents([begun]) == ['{"text": "Guess.", "guesses": []}']
    assert contents([none, number]) == [
        "That is no action: it stands on a line after ####.",
        "That is no action: it must be a JSON object",
    ]
    assert contents([broken])[0].startswith("That is no action: no JSON: ")
    assert (broken.done, broken.reward) == (True, 0.0)
    assert (over.reward, over.done) == (1.0, True)


def test_what_fails_in_the_server_ends_the_episode_with_an_error(guessing, url):
    with pytest.raises(EnvironmentFailed, match="reset: .* the record has no 'secret'"):
        heard(guessing, [], {})
    with running(url, extract="whole") as pool:
        failing = json.dumps({"guess": 1, "note": "fail"})
        with pytest.raises(EnvironmentFailed, match="step 1: .*EXECUTION_ERROR: .* fell over"):
            heard(pool, [failing], {})
    with (
        running(url, **SAYS | {"describe": "{observation[txt]}"}) as pool,
        pytest.raises(EnvironmentFailed, match="reset: .*cannot be filled from .*'txt'"),
    ):
        heard(pool, [], {})


def test_a_server_that_is_full_or_away_ends_the_episode_with_an_error():
    from tests.rollout_worker.environments.adapters.openenv_kinds import serving

    with serving(most_sessions=1) as url, running(url, **SAYS) as pool:
        first = pool.begin_episode({}, 1)
        answer(first)
        with pytest.raises(EnvironmentFailed, match="reset: .*CAPACITY_REACHED"):
            heard(pool, [], {})
        first.end()
    with (
        running(url, **SAYS) as pool,
        pytest.raises(EnvironmentFailed, match="reset: ConnectionError: no connection to"),
    ):
        heard(pool, [], {})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "must be the address of a server, such as http://"),
        ({"url": "ftp://127.0.0.1"}, "must be the address of a server"),
        ({"url": "http://127.0.0.1:port"}, "must be the address of a server"),
        ({"action": {"guess": "text"}}, "must have a field with the value '{text}'"),
        ({"action": "text"}, "action='text' cannot be: .* a valid dictionary"),
        ({"describe": "{observaton}"}, "nearest: 'observation'"),
        ({"reset_fields": "secret"}, "reset_fields='secret' cannot be: 'str' instances are not"),
        ({"extract": "last"}, "extract='last' cannot be: .* 'marker' or 'whole'"),
        ({"most_invalid": 0}, "most_invalid=0 cannot be: .* than or equal to 1"),
    ],
)
def test_parameters_that_break_a_rule_are_refused(params, message):
    with pytest.raises(BadScorer, match=message):
        OpenEnvSession(**({"url": "http://127.0.0.1:8000"} | params))


def test_it_needs_its_package_and_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **named):
        if name == "websockets":
            raise ModuleNotFoundError("No module named 'websockets'")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadAdapter, match=r"pip install '.\[openenv\]'"):
        OpenEnvSession("http://127.0.0.1:8000")
