"""Groups on their way to the learner: pushed in order, and dropped only while they are queued."""

import threading

import numpy as np
import pytest

from rollout_worker.leased_group import LeasedGroup
from rollout_worker.pusher import Pusher
from rollout_worker.worker_records import LeaseOutcome
from services.wire.messages import Completion, FinishReason, Group, Lease, PushOutcome
from tests.deadlines import HANG_S


class Line:
    """A connection that takes groups only while it is open."""

    def __init__(self):
        self.open = threading.Event()
        self.pushed: list[tuple[str, int]] = []

    def push_group(self, packed, timeout_s):
        assert self.open.wait(HANG_S)
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
        samples=lambda leased: (),
        on_result=lambda leased, result: results.append(result),
        on_failure=lambda: None,
    )
    yield pusher
    pusher.close()


def finished(group_id: str, attempt: int = 0) -> LeasedGroup:
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
    lease = Lease(group_id=group_id, attempt=attempt, epoch=0, position=0)
    return LeasedGroup(lease, begun=True, group=group)


def test_a_cancelled_group_that_is_queued_is_dropped_and_the_others_are_not(pusher, line, results):
    groups = [finished(group_id) for group_id in ("a", "b", "c")]
    for group in groups:
        pusher.put_group(group)
    groups[1].cancelled = True
    line.open.set()
    assert results.reached(2)
    assert line.pushed == [("a", 0), ("c", 0)]
    assert [result.outcome for result in results] == [LeaseOutcome.ACCEPTED] * 2


def test_a_group_may_come_again_under_the_name_of_one_that_was_cancelled(pusher, line, results):
    """As after the restart of a learner whose groups are counted again from a checkpoint."""
    first, again = finished("a"), finished("a")
    first.cancelled = True
    for group in (first, again, finished("b")):
        pusher.put_group(group)
    line.open.set()
    assert results.reached(2)
    assert line.pushed == [("a", 0), ("b", 0)]
