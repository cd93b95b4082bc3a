"""Prompts that are under way: which are complete, and what is waited for."""

import concurrent.futures
import itertools

import numpy as np
import pytest

from models.load_tokenizer import load_tokenizer
from rollout_worker.data.prompts import Prompt
from rollout_worker.engine.decode_request import DecodeRequest
from rollout_worker.engine.engine import Engine
from rollout_worker.environments.episodes import EpisodeGroup
from rollout_worker.prompt_tasks import PromptTask, PromptTasks, ScoredGroup
from rollout_worker.rewards.reward_pool import PendingScores, RewardPool, Score
from services.process.phase_clock import PhaseClock
from tests.rollout_worker.environments.test_episodes import DEMO, OVER, Pool, drawn, said

PROMPT = Prompt(
    prompt_id=7,
    question="3 + 4",
    answer="7",
    token_ids=np.array([1, 2], np.int32),
    item={},
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


class QuickEngine(Engine):
    """Ends every row that it has at its next step, with a token and a stop token."""

    usable = True
    pending = property(lambda self: bool(self.requests))

    def __init__(self, stop):  # no device
        self.requests, self.ended = [], []
        self._stop = stop

    def submit_requests(self, requests):
        self.requests += requests

    def step(self, account=None):
        requests, self.requests = self.requests, []
        return [drawn(one, sample, [40], self._stop) for one in requests for sample in one.samples]

    def end_episode(self, episode):
        self.ended.append(episode)

    def abort_request(self, request_id):
        """Its rows come back at the next step, as those of an engine do."""


class Scores(PendingScores):
    """Which are there when a test says so."""

    done = False

    def __init__(self):  # no processes
        pass

    def wait(self):
        return [Score({}, 1.0, "")]


class Rewards(RewardPool):
    """Scores each group apart, when a test says so."""

    def __init__(self):  # no processes
        self.pending = []

    def submit(self, items):
        self.pending.append(Scores())
        return self.pending[-1]


def request(name, samples=1):
    return DecodeRequest(
        request_id=name,
        token_ids=PROMPT.token_ids,
        prompt_id=PROMPT.prompt_id,
        epoch=0,
        samples=tuple(range(samples)),
        max_new_tokens=32,
        key_data=np.array([3, 4], np.uint32),
    )


def task(group, name):
    return PromptTask(name, PROMPT, group, policy_version=0, weight_digest="", clock_s={})


def played(name, script, tokenizer, *others, now=lambda: 0.0, **changes):
    scripts = [script, *others]
    group = EpisodeGroup(
        request(name, len(scripts)),
        {},
        Pool(scripts, **changes),
        tokenizer,
        max_prompt_tokens=64,
        now=now,
    )
    return task(group, name)


@pytest.fixture
def tasks(tokenizer):
    [stop] = tokenizer.stop_ids
    return PromptTasks(QuickEngine(stop), PhaseClock())


@pytest.fixture
def no_wait(monkeypatch):
    def refuse(*args):
        raise AssertionError("waited although a prompt is complete")

    monkeypatch.setattr(concurrent.futures, "wait", refuse)
    monkeypatch.setattr(Scores, "wait_done", refuse)


@pytest.mark.usefixtures("no_wait")
def test_episodes_that_have_ended_do_not_wait_for_the_environment_of_others(tasks, tokenizer):
    waiting = played("a/0", [said("Guess."), None], tokenizer)
    ended = played("a/1", [said("Guess."), OVER], tokenizer)
    tasks.begin([waiting, ended])
    assert tasks.advance(None) == []
    assert tasks.advance(None) == [ended]
    assert list(tasks) == [waiting] and tasks.decoding
    assert tasks._engine.ended == ["a/1"]


def test_the_wait_for_environments_is_a_phase_of_its_own(tokenizer, monkeypatch):
    moment = [100.0]
    monkeypatch.setattr(concurrent.futures, "wait", lambda *_: moment.append(moment[-1] + 5.0))
    clock = PhaseClock(now=lambda: moment[-1])
    tasks = PromptTasks(QuickEngine(*tokenizer.stop_ids), clock)
    tasks.begin([played("a/0", [said("Guess."), None], tokenizer)])
    for account in (None, None, "eval"):
        tasks.advance(account)
    spent = {phase: seconds for phase, seconds in clock.total().items() if seconds}
    assert spent == {"environment": 5.0, "eval": 5.0}


def test_the_turns_of_episodes_take_no_time_of_scorers(tokenizer):
    clock = PhaseClock(now=itertools.count(0.0).__next__)  # no phase is too short to see
    tasks = PromptTasks(QuickEngine(*tokenizer.stop_ids), clock)
    tasks.begin([played("a/0", [said("Guess."), OVER], tokenizer)])
    while tasks:
        tasks.advance(None)
    phases = {phase for phase, seconds in clock.total().items() if seconds}
    assert phases == {"environment", "decode", "unexplained"}


@pytest.mark.usefixtures("no_wait")
def test_a_group_closes_with_the_answers_that_have_come(tasks, tokenizer):
    moment = [0.0]
    scripts = [[said("Guess."), OVER], [said("Guess."), OVER], [said("Guess."), None]]
    closing = {"close_at_least": 2, "close_after_s": 30, "now": lambda: moment[-1]}
    group = played("a/0", scripts[0], tokenizer, *scripts[1:], **closing)
    tasks.begin([group])
    assert tasks.advance(None) == []
    moment.append(31.0)  # the answers come with the end of the time
    assert tasks.advance(None) == [group]
    errors = [bool(score.error) for score in group.group.scores()]
    assert errors == [False, False, True]


@pytest.mark.usefixtures("no_wait")
def test_a_group_that_is_scored_does_not_wait_for_the_scorers_of_others(tasks, tokenizer):
    rewards = Rewards()
    waiting, scored = (
        task(ScoredGroup(request(name), PROMPT, rewards, tokenizer), name)
        for name in ("b/0", "b/1")
    )
    tasks.begin([waiting, scored])
    assert tasks.advance(None) == [] and not tasks.decoding
    rewards.pending[1].done = True
    assert tasks.advance(None) == [scored]
    rewards.pending[0].done = True
    assert tasks.advance(None) == [waiting] and not tasks


def test_rows_of_a_prompt_that_was_ended_are_no_others(tasks, tokenizer):
    """A prompt may come again while rows of its first request are in the engine."""
    rewards = Rewards()
    gone, again = (
        task(ScoredGroup(request(name, 2), PROMPT, rewards, tokenizer), name)
        for name in ("c/0", "c/1")
    )
    tasks.begin([gone])
    other = played("c/2", [said("Guess."), OVER], tokenizer)
    tasks.begin([other, again])
    tasks.abort([gone])
    assert tasks.advance(None) == []
    assert [row.request_id for row in again.group.completions()] == ["c/1", "c/1"]
    assert not gone.group.completions()
    assert tasks.advance(None) == [other]
