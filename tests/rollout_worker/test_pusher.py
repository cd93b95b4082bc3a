"""Groups on their way to the learner: pushed in order, and dropped only while they are queued."""

import threading

import numpy as np
import pytest

from rollout_worker.lease_records import LeaseOutcome
from rollout_worker.pusher import Finished, Pusher
from services.wire.messages import Completion, FinishReason, Group, PushOutcome


class Line:
    """A connection that takes groups only while it is open."""

    def __init__(self):
        self.open = threading.Event()
        self.pushed: list[tuple[str, int]] = []

    def push_packed(self, packed, timeout_s):
        assert self.open.wait(10)
        self.pushed.append((packed.header.group_id, packed.header.attempt))
        return PushOutcome.ACCEPTED

    def close(self):
        self.open.set()


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def results():
    """Filled as groups are answered; `results.reached(n)` waits for so many."""

    class Results(list):
        changed = threading.Condition()

        def append(self, result):
            with self.changed:
                super().append(result)
                self.changed.notify_all()

        def reached(self, count):
            with self.changed:
                return self.changed.wait_for(lambda: len(self) >= count, 10)

    return Results()


@pytest.fixture
def pusher(line, results):
    pusher = Pusher(
        lambda address: line,
        "learner:1",
        timeout_s=10,
        on_result=results.append,
        on_failure=lambda: None,
    )
    yield pusher
    pusher.close()


def finished(group_id: str, attempt: int = 0) -> Finished:
    completion = Completion(
        sample_index=0,
        token_ids=np.array([1], np.int32),
        behavior_logprobs=np.array([-1.0], np.float32),
        finish_reason=FinishReason.STOP,
        rewards={"r": 1.0},
        total_reward=1.0,
    )
    group = Group(
        run_id="run-a",
        group_id=group_id,
        attempt=attempt,
        prompt_id=0,
        epoch=0,
        policy_version=0,
        weight_digest="d" * 64,
        worker="rollout-0",
        prompt_token_ids=np.array([5], np.int32),
        completions=(completion,),
        phase_s={},
    )
    return Finished(group, tuple)


def test_a_cancelled_group_that_is_queued_is_dropped_and_the_others_are_not(pusher, line, results):
    for group_id in ("a", "b", "c"):
        pusher.put(finished(group_id))
    pusher.cancel("b", 0)
    pusher.cancel("c", 1)
    line.open.set()
    assert results.reached(2)
    assert line.pushed == [("a", 0), ("c", 0)]
    assert [result.outcome for result in results] == [LeaseOutcome.ACCEPTED] * 2


def test_a_group_that_was_cancelled_before_it_was_queued_may_come_under_the_same_name(
    pusher, line, results
):
    """As after the restart of a learner whose books begin again at a checkpoint."""
    line.open.set()
    pusher.put(finished("a"))
    assert results.reached(1)
    pusher.cancel("a", 0)
    pusher.cancel("b", 0)
    pusher.put(finished("a"))
    pusher.put(finished("b"))
    assert results.reached(3)
    assert line.pushed == [("a", 0), ("a", 0), ("b", 0)]
