"""Episodes of environments that gymnasium has, in the processes of a run."""

import builtins

import pytest

from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.environments.adapters import gymnasium_text
from rollout_worker.environments.adapters.gymnasium_text import GymnasiumText
from rollout_worker.environments.adapters.parameter_checks import BadAdapter
from rollout_worker.environments.environment_pool import EnvironmentPool, validate_environment
from rollout_worker.environments.turn_values import Said
from rollout_worker.rewards.scorers import BadScorer
from tests.deadlines import HANG_S
from tests.rollout_worker.environments.adapters.lost_processes import kill_children
from tests.rollout_worker.environments.test_environment_pool import REWARD, answer, heard

gymnasium = pytest.importorskip("gymnasium")

NAME = "rollout_worker.environments.adapters.gymnasium_text:GymnasiumText"
KINDS = "tests.rollout_worker.environments.adapters.gymnasium_kinds"
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
LAKE = {
    "env_id": "FrozenLake-v1",
    "env_params": {"is_slippery": False},
    "actions": MOVES,
    "describe": "{render}",
    "extract": "whole",
}


def configured(**params):
    return EnvironmentConfig(name=NAME, params=params, timeout_s=HANG_S)


def played(params, texts, item=None, seed=1):
    """One episode in a process of its own."""
    pool = EnvironmentPool(configured(**params), REWARD)
    try:
        return heard(pool, texts, item, seed)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def lake():
    pool = EnvironmentPool(configured(**LAKE), REWARD)
    yield pool
    pool.close()


def content(turn):
    [message] = turn.messages
    assert message["role"] == "user"
    return message["content"]


def test_words_move_over_the_frozen_lake_to_the_goal(lake):
    way = ["Down", "down", "right", " down\n", "right", "RIGHT"]
    begun, first, *between, over = heard(lake, way, {"question": "Reach G, avoid H."})
    assert content(begun) == (
        "Reach G, avoid H.\n\n<red>S</red>FFF\nFHFH\nFFFH\nHFFG\n\n"
        "Actions: left, down, right, up. Write one, and nothing else."
    )
    assert content(first) == "  (Down)\nSFFF\n<red>F</red>HFH\nFFFH\nHFFG"
    assert {turn.reward for turn in [first, *between]} == {0.0}
    assert (over.reward, over.done) == (1.0, True)
    assert over.numbers == {
        "invalid_actions": 0.0,
        "env_steps": 1.0,
        "terminated": 1.0,
        "truncated": 0.0,
    }


def test_a_hole_ends_the_episode_without_reward(lake):
    *_, over = heard(lake, ["right", "down"], {})
    assert (over.reward, over.done, over.numbers["terminated"]) == (0.0, True, 1.0)


def test_what_is_no_action_is_answered_with_the_actions_and_bounded(lake):
    _, wrong, moved, empty, over = heard(lake, ["jump", "down", "", "1"])
    rule = "Actions: left, down, right, up. Write one, and nothing else."
    assert content(wrong) == f"'jump' is no action. {rule}"
    assert [turn.numbers["invalid_actions"] for turn in (wrong, moved, empty)] == [1.0, 0.0, 1.0]
    assert [turn.numbers["env_steps"] for turn in (wrong, moved, empty)] == [0.0, 1.0, 0.0]
    assert (empty.done, over.done, over.reward) == (False, True, 0.0), "the third one ends it"


def test_taxi_takes_numbers_after_the_marker_and_shows_its_colours():
    params = {"env_id": "Taxi-v4", "describe": "{observation}\n{render}", "invalid_reward": -2}
    begun, none, far, wrong = played(params, ["4", "I pick up.\n#### 5", "#### 6"], seed=2**40)
    env = gymnasium.make("Taxi-v4")
    observation, _ = env.reset(seed=2**40 % 2**31)
    [number, _, drawn] = content(begun).split("\n", 2)
    assert number == str(observation)
    assert all(f"<{colour}>" in drawn for colour in ("yellow", "blue", "magenta"))
    assert "\x1b" not in drawn and drawn.endswith("Actions: 0 to 5. Write one after ####.")
    assert content(none).startswith("No action found. Actions: 0 to 5.") and none.reward == -2
    assert (far.reward, far.done) == (env.step(5)[1], False) == (-10.0, False)
    assert content(wrong).startswith("'6' is no action. Actions: 0 to 5.")


def test_blackjack_is_that_of_its_seed():
    params = {
        "env_id": "Blackjack-v1",
        "actions": {"stick": 0, "hit": 1},
        "describe": "You have {observation[0]}, the dealer {observation[1]}.",
        "system_prompt": "Play.",
    }
    pool = EnvironmentPool(configured(**params), REWARD)
    ends = set()
    try:
        for seed in range(6):
            first, second = (
                heard(pool, ["#### hit", "#### stick"][place:], {}, seed) for place in (1, 1)
            )
            assert first == second
            env = gymnasium.make("Blackjack-v1")
            (mine, dealer, _), _ = env.reset(seed=seed)
            [system, user] = first[0].messages
            assert system == {"role": "system", "content": "Play."}
            assert user["content"].startswith(f"You have {mine}, the dealer {dealer}.")
            assert (first[1].reward, first[1].done) == (env.step(0)[1], True)
            ends.add((user["content"], first[1].reward))
    finally:
        pool.close()
    assert len(ends) > 3


def test_an_episode_goes_on_in_another_process_where_its_own_is_lost():
    params = LAKE | {"env_params": {"is_slippery": True, "map_name": "8x8"}}
    ways = ["right", "right", "down", "right", "up", "right"]
    pool = EnvironmentPool(configured(**params), REWARD)
    try:
        expected = [turn.messages for turn in heard(pool, ways, {}, 5)]
        conversation = pool.begin_episode({}, 5)
        turns = [answer(conversation).messages]
        for place, way in enumerate(ways):
            if place == 3:
                kill_children()
            conversation.say(Said(way))
            turns.append(answer(conversation).messages)
        assert turns == expected and len({str(turn) for turn in turns}) > 4
    finally:
        pool.close()


def test_numbers_of_a_box_have_four_digits():
    begun, moved = played({"env_id": "CartPole-v1"}, ["#### 1"])
    env = gymnasium.make("CartPole-v1")
    for turn, observation in ((begun, env.reset(seed=1)[0]), (moved, env.step(1)[0])):
        shown = ", ".join(str(float(f"{value:.4g}")) for value in observation.tolist())
        assert content(turn).startswith(f"[{shown}]")
    assert moved.reward == 1.0


def test_a_space_of_texts_takes_the_text_and_a_time_limit_ends_the_episode():
    params = {"env_id": f"{KINDS}:Echo-v0", "describe": "{observation[text]} {observation[share]}"}
    begun, wrong, first, over = played(params, ["#### abd", "#### ab", "#### c"])
    assert content(begun) == " [0.0]\n\nWrite a text of 1 to 5 of the characters abc after ####."
    assert content(wrong).startswith("'abd' is no action. Write a text of 1 to 5")
    assert content(first) == "ab [0.6667]"
    assert (over.reward, over.done) == (0.5, True)
    assert (over.numbers["terminated"], over.numbers["truncated"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"env_id": "FrozenLak-v1"}, "cannot make env_id='FrozenLak-v1'.*mean: `FrozenLake`"),
        ({"env_id": "no_such_package:Env-v0"}, "cannot make env_id='no_such_package:Env-v0'"),
        ({"env_id": 3}, "env_id=3 cannot be: .* a valid string"),
        ({"env_params": {"is_slipery": True}}, "nearest: 'is_slippery'.*; it takes desc, map_name"),
        ({"env_params": {"render_mode": "ansi"}}, "env_params.render_mode must be left out"),
        ({"env_params": [1]}, r"env_params=\[1\] cannot be: .* a valid dictionary"),
        ({"actions": {"left": 0, "down": 4}}, "actions.down=4 must be an action of 0 to 3"),
        ({"actions": {"left": 0, "LEFT ": 1}}, "actions has 'LEFT ' twice"),
        ({"actions": ["left"]}, r"actions=\['left'\] cannot be: .* a valid dictionary"),
        ({"describe": "{rendr}"}, r"\{observation\}, \{render\} .nearest: 'render'"),
        ({"describe": "{observation[0]}"}, "cannot be filled from the observation 0: TypeError"),
        ({"describe": "{render}", "env_id": "CartPole-v1"}, "CartPole-v1 draws no text: its rend"),
        ({"env_id": "Pendulum-v1"}, "env_id='Pendulum-v1' has the action space Box"),
        ({"env_id": f"{KINDS}:Echo-v0", "actions": MOVES}, "actions must be left out.* not Discr"),
        ({"extract": "last"}, "extract='last' cannot be: .* 'marker' or 'whole'"),
        ({"most_invalid": 0}, "most_invalid=0 cannot be: .* than or equal to 1"),
        ({"invalid_reward": "0"}, "invalid_reward='0' cannot be: .* a valid number"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode='ansi'")
def test_parameters_that_break_a_rule_are_refused(params, message):
    with pytest.raises(BadScorer, match=message):
        GymnasiumText(**({"env_id": "FrozenLake-v1"} | params))


def test_a_run_refuses_them_before_it_starts():
    with pytest.raises(ValueError, match="GymnasiumText' cannot be made.*nearest: 'describe'"):
        validate_environment(configured(env_id="Taxi-v4", descibe="x"), REWARD)
    with pytest.raises(ValueError, match="GymnasiumText': most_invalid=0 cannot be"):
        validate_environment(configured(env_id="Taxi-v4", most_invalid=0), REWARD)


def test_it_needs_its_package_and_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **named):
        if name == "gymnasium":
            raise ModuleNotFoundError("No module named 'gymnasium'")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadAdapter, match=r"pip install '.\[gymnasium\]'"):
        GymnasiumText("FrozenLake-v1", {"map_name": "8x8"})


@pytest.mark.parametrize(
    ("drawn", "read"),
    [
        ("\x1b[41mS\x1b[0mF\x1b[1;32mG\x1b[m", "<red>S</red>F<green>G</green>"),
        ("\x1b[2K\x1b[1mbold\x1b[0m", "bold"),
        ("\x1b[38;5;7mgrey\x1b[0m", "grey"),
    ],
)
def test_what_is_drawn_for_a_terminal_is_read_without_its_codes(drawn, read):
    assert gymnasium_text._marked(drawn) == read
