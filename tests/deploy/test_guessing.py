"""The guessing game: its rules, its made-up games, and the room that its run leaves for them."""

import asyncio
import random

import pytest

from deploy.demo import guessing
from driver.config.load_config import load_as
from driver.config.run_config import RunConfig
from models.load_tokenizer import load_tokenizer


def played(messages, secret):
    """Plays the model's turns of a game against the environment; its answers and rewards."""

    async def play():
        game = guessing.Guessing()
        begun = await game.reset({"question": guessing.QUESTION, "secret": secret}, 0)
        said = [m for m in messages if m["role"] == "assistant"]
        return begun, [await game.step(message) for message in said]

    return asyncio.run(play())


@pytest.mark.parametrize("secret", [guessing.LOWEST, 25, 33, guessing.HIGHEST])
def test_who_halves_what_is_left_wins_and_the_answers_are_those_of_the_environment(secret):
    messages = guessing.play(secret, random.Random(0), listening=1.0)
    begun, steps = played(messages, secret)
    heard = [message for messages, *_ in steps for message in messages]
    assert begun + heard == [m for m in messages if m["role"] == "user"]
    assert [reward for _, reward, *_ in steps][-1] == 1.0 and len(steps) <= 5
    assert [done for _, _, done, _ in steps] == [False] * (len(steps) - 1) + [True]


def test_a_game_is_lost_after_six_guesses_or_by_what_is_no_guess():
    wrong = [{"role": "assistant", "content": "11"}] * 6
    _, steps = played(wrong, 40)
    assert [(reward, done) for _, reward, done, _ in steps] == [(0.0, False)] * 5 + [(0.0, True)]
    _, [(messages, reward, done, _)] = played([{"role": "assistant", "content": "eleven"}], 11)
    assert (messages, reward, done) == ([], 0.0, True)


def test_a_player_who_listens_always_wins_and_the_others_seldom():
    draw = random.Random(0)
    for listening, least, most in ((1.0, 1.0, 1.0), (0.0, 0.1, 0.25)):
        won = 0
        for _ in range(500):
            secret = draw.randint(guessing.LOWEST, guessing.HIGHEST)
            game = guessing.play(secret, draw, listening)
            won += game[-1]["content"] == str(secret)
        assert least <= won / 500 <= most  # a guess of 6 finds one of 31 numbers: 0.18


def test_the_made_up_games_begin_with_those_who_listen_and_all_fit_the_run():
    config = load_as(RunConfig, "deploy/runs/guessing_cpu.yaml", [])
    tokenizer = load_tokenizer("deploy/demo/model")
    games = [game["messages"] for game in guessing.games()]
    middle = [game[1]["content"] == "25" for game in games]
    first, second = middle[: guessing.LISTENED], middle[guessing.LISTENED :]
    # Who does not listen begins with the middle once in 31 games.
    assert all(first) and 0.2 < sum(second) / len(second) < 0.35
    prompt = len(tokenizer.encode_chat(games[0][:1]))
    assert prompt <= config.rollout.max_prompt_tokens
    longest = max(len(tokenizer.encode_chat(game)) for game in games[:100] + games[-500:])
    assert longest - prompt <= config.rollout.max_completion_tokens
