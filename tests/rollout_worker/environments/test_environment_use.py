"""The time of calls and episodes, by hand and of a pool."""

import concurrent.futures

import pytest

from rollout_worker.environments.environment_use import NO_USE, EnvironmentUse, UseMeter
from rollout_worker.environments.turn_values import Said
from tests.deadlines import HANG_S
from tests.rollout_worker.environments.test_environment_pool import answer, make_pool


def test_calls_and_episodes_are_timed():
    now = [10.0]
    meter = UseMeter(now=lambda: now[0])
    meter.count_episodes(1)
    short, long = meter.begin_call(), meter.begin_call()
    now[0] = 11.0
    short(None)
    meter.count_episodes(1)
    now[0] = 14.0
    long(None)
    meter.count_episodes(-1)
    # One episode for a second, two for three; calls of 1 s and 4 s.
    first = meter.take_use()
    assert first == EnvironmentUse(calls=2, call_s=5.0, longest_call_s=4.0, episode_s=7.0)
    now[0] = 16.0
    assert meter.take_use() == EnvironmentUse(episode_s=2.0), "one is in flight"
    assert first.metrics(3.5) == {
        "environment/calls": 2.0,
        "environment/call_s_mean": 2.5,
        "environment/call_s_max": 4.0,
        "environment/episodes_mean": 2.0,
    }


def test_the_use_of_several_workers_adds_up():
    one = EnvironmentUse(calls=1, call_s=2.0, longest_call_s=2.0, episode_s=3.0)
    other = EnvironmentUse(calls=2, call_s=2.0, longest_call_s=1.5, episode_s=1.0)
    assert one + other == EnvironmentUse(calls=3, call_s=4.0, longest_call_s=2.0, episode_s=4.0)
    assert one + NO_USE == one and NO_USE.metrics(1.0) == {}


@pytest.fixture
def pool():
    pool = make_pool("Bad")
    yield pool
    pool.close()


def test_no_episode_is_counted_after_its_end_however_it_ends(pool):
    """Over, failed at reset and at a step, and abandoned in the middle of a call."""
    does = ("an object", "reset raises", "raises", "an object")
    over, *failed, left = [pool.begin_episode({"does": one}, 1) for one in does]
    concurrent.futures.wait([one.call for one in (over, *failed, left)], HANG_S)
    assert pool._meter._episodes == 4
    for one in (over, failed[1], left):
        answer(one)
        one.say(Said("3"))
    concurrent.futures.wait([over.call, failed[1].call], HANG_S)
    with pytest.raises(Exception, match="fell over"):
        failed[1].answer()
    for one in (over, *failed, left):
        one.end()
        one.end()
    assert pool._meter._episodes == 0
    use = pool.take_use()
    assert use.calls >= 6 and 0 < use.longest_call_s <= use.call_s
