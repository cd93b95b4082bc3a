"""An evaluation by workers that have nothing else to do, while training goes on.

What holds of it:

* Every completion is of one policy version, that of the evaluated step. Workers are told to keep it
  before it is published (`Orders.keep_version`), and one that does not hold it is not asked.
* Training comes first. A worker that gets a lease, or a newer version, puts its share aside at the
  next segment of decoding, and begins the prompts that were not complete anew, with the same draws.
* A share of a worker that is lost goes to another one that keeps the version. Where none does, the
  evaluation is given up, and the run says so.
"""

import collections
from collections.abc import Callable, Collection, Iterator, Sequence

from driver.fleet.actor_calls import ActorFailed, ActorLost, Call
from driver.fleet.fleet_worker import Worker
from rollout_worker.worker_records import EvalItem, EvalRequest


class IdleEvaluation:
    """The shares of one evaluation: those that wait, those that are out, and what came back."""

    def __init__(
        self,
        step: int,
        policy_version: int,
        shares: Sequence[EvalRequest],
        ended: Callable[[Collection[Call[list[EvalItem]]]], set[Call[list[EvalItem]]]],
    ):
        """Args:
        step: that is evaluated.
        ended: those of some calls that have ended; waits for none.
        """
        self.step = step
        self.policy_version = policy_version
        self._waiting = collections.deque(shares)
        self._out: dict[Call[list[EvalItem]], tuple[str, EvalRequest]] = {}
        """Name of the worker and share, by call."""
        self._items: dict[int, list[EvalItem]] = collections.defaultdict(list)
        self._ended = ended

    @property
    def complete(self) -> bool:
        """Whether every prompt is completed."""
        return not self._waiting and not self._out

    @property
    def calls(self) -> Collection[Call[list[EvalItem]]]:
        """The shares that are out."""
        return self._out.keys()

    def items(self, sets: int) -> list[list[EvalItem]]:
        """The completions of each held-out set."""
        return [self._items[which] for which in range(sets)]

    def turn(self, workers: Collection[Worker]) -> None:
        """Collects shares that have ended, and hands others out.

        Args:
            workers: that take leases. One without a lease gets a share at a time.
        """
        for call in self._ended(self.calls) if self._out else ():
            _, share = self._out.pop(call)
            try:
                items = call.result()
            except (ActorLost, ActorFailed):  # the fleet finds out by itself, and says why
                items = []
            if items:
                self._items[share.held_out] += items
            else:
                self._waiting.append(share)
        for worker in self._idle(workers):
            if not self._waiting:
                return
            assert worker.handle is not None
            share = self._waiting.popleft()
            self._out[worker.handle.evaluate(share)] = (worker.name, share)

    def is_lost(self, workers: Collection[Worker], current_version: int) -> bool:
        """Whether no worker can complete what is left, since none holds the version any more.

        Args:
            workers: whose process is ready.
            current_version: the learner's.
        """
        if self.complete or self._out or current_version <= self.policy_version:
            return False
        return bool(workers) and all(
            worker.policy_version > self.policy_version
            and worker.kept_version != self.policy_version
            for worker in workers
        )

    def _idle(self, workers: Collection[Worker]) -> Iterator[Worker]:
        busy = {name for name, _ in self._out.values()}
        for worker in workers:
            holds = self.policy_version == worker.kept_version
            if holds and not worker.leases and worker.handle and worker.name not in busy:
                yield worker
