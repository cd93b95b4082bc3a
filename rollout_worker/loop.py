"""The loop of a rollout worker: takes leases, holds the version they ask for, decodes, hands on.

One thread owns device and ledger clock. Weights come and groups go in threads beside it
(`fetcher.py`, `pusher.py`); calls from the driver only leave something in the inbox or take
something from the outbox.

A newer version is swapped in when no group is being decoded, its scores apart: groups end under the
version they began with, and none begins while a swap is due.
"""

import collections
import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

from rollout_worker.fetcher import Fetched, Fetcher, Patience
from rollout_worker.lease_records import LeaseOutcome, LeaseResult, News, Orders, WorkerState
from rollout_worker.pusher import Finished, Pusher
from rollout_worker.worker import RolloutWorker
from services.process import failpoints
from services.process.background import Background
from services.process.phase_clock import PhaseClock
from services.process.process_memory import ProcessMemory
from services.wire.messages import Group, Lease

LOOK_S = 0.2
"""How long a wait inside the loop may keep it from its inbox."""


class WorkLoop:
    """Owns the working thread of one worker."""

    def __init__(
        self,
        worker: RolloutWorker,
        clock: PhaseClock,
        *,
        make_fetcher: Callable[[Callable[[], None]], Fetcher],
        make_pusher: Callable[[Callable[[LeaseResult], None], Callable[[], None]], Pusher],
        swap: Callable[[Fetched], None],
        samples: Callable[[Group, Lease], tuple[dict[str, Any], ...]],
        memory: Callable[[], ProcessMemory],
        weights_timeout_s: float,
    ):
        """Starts at once.

        Args:
            swap: puts a fetched version on the device and proves it, or raises.
            samples: makes what is logged of a group, in the thread that pushes.
            memory: what this process holds now.
            weights_timeout_s: how long a lease may wait for the version that it asks for.
        """
        self._worker = worker
        self._clock = clock
        self._swap = swap
        self._samples = samples
        self._memory = memory
        self._patience = Patience(weights_timeout_s)
        self._weights_timeout_s = weights_timeout_s
        self._changed = threading.Condition()
        self._inbox: collections.deque[Lease] = collections.deque()
        self._leases: dict[str, Lease] = {}
        """Not ended, by group id; those in the inbox included."""
        self._cancelled: set[tuple[str, int]] = set()
        """Group id and attempt."""
        self._jobs: collections.deque[_Job] = collections.deque()
        self._results: list[LeaseResult] = []
        self._transfers: list[dict[str, Any]] = []
        self._draining = False
        self._refetch = False
        self._closed = False
        self._fetcher = make_fetcher(self._wake)
        self._pusher = make_pusher(self._ended, self._wake)
        self._thread = Background("rollout-loop", self._run, self._wake)

    def order(self, orders: Orders) -> None:
        """Takes the driver's orders; returns at once.

        Raises:
            BackgroundFailed: if one of the worker's threads has failed.
        """
        self._check()
        if orders.learner_address is not None:
            self._pusher.connect(orders.learner_address)
        if orders.sources is not None:
            self._fetcher.use(orders.sources)
        with self._changed:
            for group_id in orders.cancel:
                if group_id in self._leases:
                    attempt = self._leases.pop(group_id).attempt
                    self._pusher.cancel(group_id, attempt)
                    self._cancelled.add((group_id, attempt))
            self._inbox = collections.deque(x for x in self._inbox if x.group_id in self._leases)
            self._draining = self._draining or orders.drain
            self._refetch = self._refetch or orders.refetch
            for lease in orders.leases:
                self._leases[lease.group_id] = lease
                self._inbox.append(lease)
            if self._draining:
                while self._inbox:
                    lease = self._inbox.popleft()
                    del self._leases[lease.group_id]
                    self._results.append(_returned(lease))
            self._changed.notify_all()

    def news(self, wait_s: float) -> News:
        """What happened since the last call; waits for something to happen, at most so long.

        Raises:
            BackgroundFailed: if one of the worker's threads has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._failed or self._closed, wait_s)
            self._check()
            results, self._results = self._results, []
            transfers, fetch_s = self._fetcher.take_records()
            return News(
                state=self._state(),
                policy_version=self._worker.policy_version,
                weight_digest=self._worker.weight_digest,
                canary_gap=self._worker.canary_gap,
                held=len(self._leases),
                results=tuple(results),
                background_s={"fetch": fetch_s, "push": self._pusher.take_seconds()},
                transfers=tuple(transfers),
                memory=self._memory(),
            )

    def call(self, min_version: int, run: Callable[[], Any], timeout_s: float) -> Any:
        """Runs something on the working thread, under a version of at least this, between groups.

        Raises:
            TimeoutError: if it did not end in time.
            BackgroundFailed: if a thread of the worker has failed.
        """
        job = _Job(min_version, run)
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        self._check()
        return job.done.result(timeout_s)

    def stop(self) -> None:
        """Has the threads end after what they are at; returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._fetcher.close()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Ends the threads; False if the working thread is still at it."""
        self.stop()
        ended = self._thread.join(timeout_s)
        self._pusher.close()
        return ended

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._clock.phase("idle"):
                    self._wait_for_work()
                if not self._closed:
                    self._turn()
        except BaseException as error:
            for job in self._jobs:
                job.done.set_exception(error)
            raise

    def _turn(self) -> None:
        self._give_up_cancelled()
        if self._refetch and not self._worker.held:
            self._refetch = False
            self._worker.policy_version = -1
            self._fetcher.forget()
        if self._swap_is_due():
            if not self._worker.decoding:
                self._swap_in()
        elif self._jobs:
            if not self._worker.held:
                self._jobs.popleft().run_now()
        else:
            self._begin()
        if self._worker.held:
            failpoints.reach("worker.decode")
            for group in self._worker.advance(LOOK_S):
                self._hand_on(group)

    def _swap_is_due(self) -> bool:
        ready = self._fetcher.ready
        held = self._worker.policy_version
        return self._wanted() > held or (ready is not None and ready.manifest.policy_version > held)

    def _swap_in(self) -> None:
        """Swaps the fetched version in, or waits a moment for the one that is asked for."""
        fetched, wanted = self._fetcher.take(), self._wanted()
        if fetched is not None and fetched.manifest.policy_version >= wanted:
            self._patience.over()
            with self._clock.phase("weights_swap"):
                self._swap(fetched)
            self._clock.mark(f"version {self._worker.policy_version}")
            return
        if self._patience.waited():
            raise TimeoutError(
                f"waited {self._weights_timeout_s:g} s for policy version >= {wanted}, held is "
                f"{self._worker.policy_version}: {self._fetcher.story}"
            )
        with self._clock.phase("weights_wait"), self._changed:
            self._changed.wait_for(
                lambda: self._fetcher.ready is not None or self._closed or self._cancelled, LOOK_S
            )

    def _wanted(self) -> int:
        """The version without which nothing can begin."""
        with self._changed:
            if self._jobs:
                return self._jobs[0].min_version
            return self._inbox[0].min_policy_version if self._inbox else -1

    def _begin(self) -> None:
        with self._changed:
            held = self._worker.policy_version
            begun = []
            while self._inbox and self._inbox[0].min_policy_version <= held:
                begun.append(self._inbox.popleft())
        if begun:
            self._worker.take(begun)

    def _hand_on(self, group: Group) -> None:
        with self._changed:
            lease = self._leases.get(group.group_id)
        if lease is not None and lease.attempt == group.attempt:
            self._pusher.put(Finished(group, functools.partial(self._samples, group, lease)))

    def _give_up_cancelled(self) -> None:
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
        if cancelled:
            self._worker.give_up(cancelled)

    def _wait_for_work(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: bool(
                    self._closed
                    or self._inbox
                    or self._jobs
                    or self._cancelled
                    or self._worker.held
                    or self._fetcher.ready
                )
            )

    def _ended(self, result: LeaseResult) -> None:
        with self._changed:
            lease = self._leases.get(result.group_id)
            if lease is not None and lease.attempt == result.attempt:
                del self._leases[result.group_id]
                self._results.append(result)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def _failed(self) -> bool:
        return self._thread.failure is not None or self._pusher.failure is not None

    def _check(self) -> None:
        self._thread.check()
        self._pusher.check()

    def _state(self) -> WorkerState:
        if self._draining:
            return WorkerState.DRAINING if self._leases else WorkerState.DRAINED
        return WorkerState.WORKING if self._leases else WorkerState.READY


class _Job:
    """A call that waits for its turn on the working thread."""

    def __init__(self, min_version: int, run: Callable[[], Any]):
        self.min_version = min_version
        self.done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._run = run

    def run_now(self) -> None:
        """Runs it; an error is the caller's and the thread's, since it may have broken the
        engine.
        """
        try:
            self.done.set_result(self._run())
        except BaseException as error:
            self.done.set_exception(error)
            raise


def _returned(lease: Lease) -> LeaseResult:
    return LeaseResult(
        group_id=lease.group_id,
        attempt=lease.attempt,
        outcome=LeaseOutcome.RETURNED,
        report=None,
    )
