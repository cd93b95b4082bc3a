"""The environment of the run of episodes that is disturbed, and how a process is hit in a step."""

import asyncio
import json
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.chaos.job import WaitTimeout
from benchmarks.chaos.open_steps import OpenSteps
from benchmarks.chaos.schedule import Fault, FaultKind
from benchmarks.chaos.sum_episodes import (
    SUMS,
    SumEpisodes,
    hung_records,
    steps_under_way,
    sum_of,
    write_records,
)
from tests.deadlines import HANG_S, wait_until


def said(text):
    return {"role": "assistant", "content": text}


def test_sums_are_worked_out():
    assert sum_of("4 - 2 + 7 + 1") == 10 and sum_of("3 - 5 - 1 + 2") == -1


def test_records_are_the_same_each_time_and_only_the_hanging_one_hangs(tmp_path):
    write_records(tmp_path / "a.jsonl", 6, frozenset({4}))
    write_records(tmp_path / "b.jsonl", 6)
    a, b = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("a.jsonl", "b.jsonl")
    )
    assert [record["hangs"] for record in a] == [False] * 4 + [True, False]
    assert [record["sums"] for record in a] == [record["sums"] for record in b]
    assert all(len(record["sums"]) == SUMS for record in a)


def test_an_episode_asks_for_its_sums_in_turn_and_rewards_each(tmp_path):
    async def play():
        environment = SumEpisodes(str(tmp_path), 0.0)
        item = {"sums": ["1 + 1", "2 + 2", "3 - 4"], "hangs": False}
        asked = [(await environment.reset(item, 0))[-1]["content"]]
        rewards = []
        for answer in ("#### 2", "#### 5", "#### -1"):
            messages, reward, done, _ = await environment.step(said(answer))
            asked += [message["content"] for message in messages]
            rewards.append(reward)
        return asked, rewards, done

    asked, rewards, done = asyncio.run(play())
    assert [question.split(": ")[1] for question in asked] == ["1 + 1 =", "2 + 2 =", "3 - 4 ="]
    assert rewards == [1.0, 0.0, 1.0] and done
    assert steps_under_way(tmp_path) == []


def test_a_file_says_that_a_step_is_under_way_and_that_one_hangs(tmp_path):
    async def hang():
        environment = SumEpisodes(str(tmp_path), 0.0)
        await environment.reset({"sums": ["1 + 1", "2 + 2", "3"], "hangs": True}, 0)
        step = asyncio.create_task(environment.step(said("#### 3")))
        await asyncio.sleep(0)
        during = len(steps_under_way(tmp_path)), hung_records(tmp_path)
        step.cancel()
        await asyncio.wait({step})
        return during

    assert asyncio.run(hang()) == (1, 1)
    assert steps_under_way(tmp_path) == []


class Job:
    """A run without learner and workers."""

    def check_running(self, why):
        pass


@pytest.fixture
def process():
    started = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(3600)"],
        stdout=subprocess.PIPE,
    )
    assert started.stdout is not None
    started.stdout.readline()
    yield started
    started.kill()
    started.wait()


def fault(kind):
    return Fault(number=1, step=1, kind=kind)


def test_a_process_is_hit_only_in_a_step(tmp_path, process):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    (tmp_path / f"{ended.pid}.0.step").touch()  # left behind by one that was killed before
    ended.wait()
    with pytest.raises(WaitTimeout, match="steps that are under way: environment process killed"):
        OpenSteps(Job(), tmp_path, 0.05).hit(fault(FaultKind.ENVIRONMENT_KILLED))
    assert process.poll() is None
    (tmp_path / f"{process.pid}.0.step").touch()
    OpenSteps(Job(), tmp_path, HANG_S).hit(fault(FaultKind.ENVIRONMENT_KILLED))
    assert not psutil.pid_exists(process.pid)


def test_a_process_that_hangs_needs_two_steps_and_goes_on_where_it_has_fewer(tmp_path, process):
    (tmp_path / f"{process.pid}.0.step").touch()
    with pytest.raises(WaitTimeout, match="under way: environment process hung"):
        OpenSteps(Job(), tmp_path, 0.05).hit(fault(FaultKind.ENVIRONMENT_STOPPED))
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # which a process that is stopped does not take
    wait_until(lambda: process.poll() is not None, "the end of the process")
