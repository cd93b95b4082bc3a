"""A share of an evaluation is put aside, gone on with, cancelled or failed, and ends once."""

import pytest

from rollout_worker.engine.decode_request import SamplingSettings
from rollout_worker.evaluation.idle_share import IdleShare, ShareQueue
from rollout_worker.worker_records import EvalRequest

GREEDY = SamplingSettings(temperature=0.0)


def share(*positions, version=3):
    return IdleShare(
        EvalRequest(
            positions=positions,
            policy_version=version,
            samples=1,
            sampling=GREEDY,
            timeout_s=1.0,
            when_idle=True,
        )
    )


def test_a_share_ends_with_its_last_prompt_in_the_order_of_its_positions():
    one = share(4, 2, 7)
    one.add_items(7, ["seven"])
    one.add_items(4, ["four"])
    assert one.left == [2] and not one.ended
    one.add_items(2, ["two"])
    assert one.ended and one.wait() == ["four", "two", "seven"]


def test_a_cancelled_share_has_no_result_and_a_failed_one_the_error():
    one, other = share(1), share(1)
    one.cancel()
    assert one.wait() == []
    other.fail(RuntimeError("the engine is broken"))
    other.cancel()
    with pytest.raises(RuntimeError, match="the engine is broken"):
        other.wait()


def test_shares_come_in_order_and_those_of_another_version_are_cancelled():
    queue = ShareQueue()
    old, one, two = share(1, version=2), share(1), share(2)
    for each in (old, one, two):
        queue.put(each)
    assert queue.first(3) is one and old.wait() == []
    assert queue.first(3) is one, "it is gone on with until it ends"
    one.add_items(1, ["item"])
    assert queue.first(3) is two
    assert queue.first(4) is None and two.wait() == [] and not queue


def test_after_the_end_no_share_is_left_waiting():
    queue = ShareQueue()
    before, after = share(1), share(2)
    queue.put(before)
    queue.close(RuntimeError("gone"))
    queue.put(after)
    assert after.wait() == []
    with pytest.raises(RuntimeError, match="gone"):
        before.wait()
