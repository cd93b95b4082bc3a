"""The loop of a rollout worker: begins leased groups under the version they ask for, pushes them.

One thread owns the device and the phase clock. Weights arrive and groups leave in threads beside it
(`fetcher.py`, `pusher.py`). Calls from the driver change the table of leases, or collect results,
and return at once.

A newer version is swapped in when no group is being decoded (scores may be pending): groups end
under the version they began with, and none begins while a swap is due.

Where nothing else is to do, shares of an evaluation are completed under the version that is kept
for it. They give way at once: to leases, to a newer version and to calls.
"""

import collections
import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from rollout_worker.evaluation.idle_share import IdleShare, ShareQueue
from rollout_worker.fetcher import Fetcher
from rollout_worker.leased_group import LeasedGroup
from rollout_worker.pusher import Pusher
from rollout_worker.worker import CanaryFailed, RolloutWorker
from rollout_worker.worker_records import (
    EvalItem,
    EvalRequest,
    LeaseOutcome,
    LeaseResult,
    News,
    Orders,
)
from services.process import failpoints
from services.process.activity import Activity
from services.process.background import Background
from services.process.phase_clock import PhaseClock
from services.process.process_memory import ProcessMemory
from services.wire.health import LearnerProbe
from services.wire.messages import NO_VERSION

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.2
"""How long a wait inside the loop may delay what the driver asks for."""


class GroupsFailed(RuntimeError):
    """Groups that were begun could not be completed or scored: one of them may be the cause."""


class WorkLoop:
    """Owns the working thread of one worker."""

    def __init__(
        self,
        worker: RolloutWorker,
        clock: PhaseClock,
        *,
        make_fetcher: Callable[[Callable[[], None]], Fetcher],
        make_pusher: Callable[
            [Callable[[LeasedGroup, LeaseResult], None], Callable[[], None]], Pusher
        ],
        memory: Callable[[], ProcessMemory],
        weights_timeout_s: float,
        slack_s: float = 0.0,
        probe: LearnerProbe | None = None,
    ):
        """Starts at once.

        Args:
            memory: memory of this process and of its devices now.
            weights_timeout_s: how long a lease may wait for the version that it asks for.
            slack_s: how long the scorers of a completion may take.
            probe: asks the learner whether it is there; None where it is in this process.
        """
        self._worker = worker
        self._clock = clock
        self._memory = memory
        self._weights_timeout_s = weights_timeout_s
        self._slack_s = slack_s
        self._probe = probe
        self._waiting_since: float | None = None
        """Since when the version that a lease asks for has been missing."""
        self._ordering = threading.Lock()
        """Held while one order is taken."""
        self._latest = _LatestOrders()
        self._changed = threading.Condition()
        self._groups: dict[str, LeasedGroup] = {}
        """Leases that have not ended, by group id, in the order in which they arrived."""
        self._jobs: collections.deque[_Job] = collections.deque()
        self._shares = ShareQueue()
        """Of an evaluation, for when nothing else is to do."""
        self._keep = NO_VERSION
        """The version that is to be kept for it, as last ordered."""
        self._keeps = NO_VERSION
        """The same as the working thread has seen it."""
        self._results: list[LeaseResult] = []
        self._reported = (-1, -1)
        """The versions that were last reported: held, and kept."""
        self._draining = False
        self._refetch = False
        self._closed = False
        self._fetcher = make_fetcher(self._wake)
        self._pusher = make_pusher(self._record_result, self._wake)
        self._thread = Background("rollout-loop", self._run, self._wake)

    def order(self, orders: Orders) -> None:
        """Takes the driver's orders; returns at once.

        What later orders have said already is left out of orders that arrive late.

        Raises:
            BackgroundFailed: if one of the worker's threads has failed.
        """
        self._check()
        if orders.stop_spending:
            self._worker.stop_spending(orders.stop_spending)
        with self._ordering:
            self._take_order(orders)

    def _take_order(self, orders: Orders) -> None:
        number, latest = orders.number, self._latest
        if orders.learner_address is not None and latest.claim("learner", number):
            self._pusher.connect(orders.learner_address)
            if self._probe is not None:
                self._probe.connect(orders.learner_address)
        if orders.sources is not None and latest.claim("sources", number):
            self._fetcher.use_sources(orders.sources)
        cancel = [group_id for group_id in orders.cancel if latest.claim_group(group_id, number)]
        leases = [one for one in orders.leases if latest.claim_group(one.group_id, number)]
        latest.end_orders(number)
        with self._changed:
            for group_id in (*cancel, *(lease.group_id for lease in leases)):
                if (leased := self._groups.pop(group_id, None)) is not None:
                    leased.cancelled = True
            self._draining = self._draining or orders.drain
            self._refetch = self._refetch or orders.refetch
            if orders.keep_version is not None and latest.claim("keep", number):
                self._keep = orders.keep_version
            for lease in leases:
                self._groups[lease.group_id] = LeasedGroup(lease, order_number=number)
            if self._draining:
                for leased in self._waiting():
                    del self._groups[leased.lease.group_id]
                    self._results.append(_returned(leased))
            self._changed.notify_all()

    def news(self, wait_s: float) -> News:
        """What happened since the last call; waits for something to happen, at most so long.

        Raises:
            BackgroundFailed: if one of the worker's threads has failed.
        """
        with self._changed:
            # A new version is reported at once: without it no group can be at fault.
            self._changed.wait_for(
                lambda: (
                    self._results
                    or self._failed
                    or self._closed
                    or self._versions != self._reported
                ),
                wait_s,
            )
            self._check()
            self._reported = self._versions
            results, self._results = self._results, []
            transfers, fetch_s = self._fetcher.take_records()
            return News(
                drained=self._draining and not self._groups,
                policy_version=self._reported[0],
                kept_version=self._reported[1],
                weight_digest=self._worker.weight_digest,
                canary_gap=self._worker.canary_gap,
                held=len(self._groups),
                results=tuple(results),
                background_s={"fetch": fetch_s, "push": self._pusher.take_seconds()},
                transfers=tuple(transfers),
                memory=self._memory(),
                spent=self._worker.take_spending(),
                environment=self._worker.take_environment_use(),
                engine=self._worker.take_engine_use(),
                learner_silent_s=0.0 if self._probe is None else self._probe.silent_s,
                activity=self._activity(),
            )

    def call(self, min_version: int, run: Callable[[], T], timeout_s: float) -> T:
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

    def evaluate_when_idle(self, request: EvalRequest) -> list[EvalItem]:
        """Completes held-out prompts while nothing else is to do, under exactly their version.

        Returns:
            their completions; none where the version is not kept, or not any more.

        Raises:
            BackgroundFailed: if a thread of the worker has failed.
        """
        share = IdleShare(request)
        self._shares.put(share)
        self._wake()
        self._check()
        return share.wait()

    def stop(self) -> None:
        """Has the threads end after what they are at; returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._fetcher.close()
        if self._probe is not None:
            self._probe.close()

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
            self._shares.close(error)
            raise
        self._shares.close()

    def _turn(self) -> None:
        self._worker.drop_cancelled()
        if self._worker.evaluating and self._is_called_for():
            self._worker.pause_evaluation()
        self._keep_version()
        if self._refetch and not self._worker.busy:
            self._refetch = False
            self._worker.policy_version = -1
            self._fetcher.forget_versions()
        if self._swap_is_due():
            if not self._worker.decoding:
                self._swap_in()
        elif self._jobs:
            if not self._worker.busy:
                self._jobs.popleft().run_now()
        else:
            self._begin_groups()
            self._begin_share()
        if self._worker.busy:
            failpoints.reach("worker.decode")
            for leased in self._advance():
                if not leased.cancelled:
                    self._pusher.put_group(leased)

    def _advance(self) -> list[LeasedGroup]:
        try:
            return self._worker.advance(POLL_S)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # the sizes are too large for any prompt
                raise
            if self._worker.evaluating:  # no group is under way
                raise
            raise GroupsFailed(f"{type(error).__name__}: {error}") from error

    def _is_called_for(self) -> bool:
        """Whether there is anything to do but an evaluation."""
        with self._changed:
            other = self._waiting() or self._jobs or self._keep != self._keeps
        return bool(other or self._refetch or self._closed) or self._swap_is_due()

    def _keep_version(self) -> None:
        """Keeps the version that was last ordered."""
        if self._keep != self._keeps:
            self._keeps = self._keep
            self._fetcher.keep_version(self._keeps)
            self._worker.keep_version(self._keeps)

    def _begin_share(self) -> None:
        """Goes on with a share of an evaluation, where nothing else is under way."""
        if self._shares and not self._worker.busy:
            share = self._shares.first(self._worker.kept_version)
            if share is not None:
                self._worker.begin_evaluation(share)

    def _swap_is_due(self) -> bool:
        ready = self._fetcher.ready
        held = self._worker.policy_version
        return self._wanted() > held or (ready is not None and ready.manifest.policy_version > held)

    def _swap_in(self) -> None:
        """Swaps the fetched version in, or waits a moment for the one that is asked for."""
        fetched, wanted = self._fetcher.take_version(), self._wanted()
        version = NO_VERSION if fetched is None else fetched.manifest.policy_version
        if fetched is not None and (version >= wanted or version == self._keeps):
            self._waiting_since = None
            with self._clock.phase("weights_swap"):
                try:
                    self._worker.swap_policy(fetched.manifest, fetched.named)
                except CanaryFailed as error:
                    log.warning("%s; placing it once more", error)
                    self._worker.swap_policy(fetched.manifest, fetched.named)
            self._clock.mark(f"version {self._worker.policy_version}")
            self._wake()
            return
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if now - self._waiting_since > self._weights_timeout_s:
            raise TimeoutError(
                f"waited {self._weights_timeout_s:g} s for policy version >= {wanted}, held is "
                f"{self._worker.policy_version}: {self._fetcher.last_attempt}"
            )
        with self._clock.phase("weights_wait"), self._changed:
            self._changed.wait_for(
                lambda: self._fetcher.ready is not None or self._closed or self._wanted() != wanted,
                POLL_S,
            )

    def _wanted(self) -> int:
        """The version without which nothing can begin."""
        with self._changed:
            if self._jobs:
                return self._jobs[0].min_version
            waiting = self._waiting()
            return waiting[0].lease.min_policy_version if waiting else -1

    def _waiting(self) -> list[LeasedGroup]:
        """Leases that have not begun; to be called under the lock."""
        return [leased for leased in self._groups.values() if not leased.begun]

    def _begin_groups(self) -> None:
        """Begins the leases that the current version suffices for, up to the first that waits."""
        with self._changed:
            held = self._worker.policy_version
            due = list(
                itertools.takewhile(lambda x: x.lease.min_policy_version <= held, self._waiting())
            )
            for leased in due:
                leased.begun = True  # under the lock: from here on a drain does not return it
        if due:
            self._worker.begin_groups(due)

    def _wait_for_work(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: bool(
                    self._closed
                    or self._waiting()
                    or self._jobs
                    or self._shares
                    or self._keep != self._keeps
                    or self._worker.busy
                    or self._fetcher.ready
                )
            )

    def _record_result(self, leased: LeasedGroup, result: LeaseResult) -> None:
        with self._changed:
            if self._groups.get(result.group_id) is leased:
                del self._groups[result.group_id]
                self._results.append(result)
            self._changed.notify_all()

    def _activity(self) -> Activity:
        doing = self._clock.current
        if doing == "idle" and self._pusher.pushing:
            doing = "push"
        return Activity(
            doing=doing,
            counters=self._worker.progress | {"pushes": self._pusher.attempts},
            slack_s=self._slack_s,
        )

    @property
    def _versions(self) -> tuple[int, int]:
        """Held, and kept for an evaluation."""
        return self._worker.policy_version, self._worker.kept_version

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def _failed(self) -> bool:
        return self._thread.failure is not None or self._pusher.failure is not None

    def _check(self) -> None:
        self._thread.raise_failure()
        self._pusher.check()


class _Job(Generic[T]):
    """A call that waits for its turn on the working thread."""

    def __init__(self, min_version: int, run: Callable[[], T]):
        self.min_version = min_version
        self.done: concurrent.futures.Future[T] = concurrent.futures.Future()
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


class _LatestOrders:
    """Which orders were the last to speak of a subject, while earlier ones may still arrive."""

    def __init__(self):
        self._numbers: dict[Hashable, int] = {}
        self._newest = 0
        self._missing: set[int] = set()
        """Numbers below the newest of orders that have not arrived."""

    def end_orders(self, number: int) -> None:
        """Notes that the orders of this number have claimed all their subjects."""
        self._missing.update(range(self._newest + 1, number))
        self._missing.discard(number)
        self._newest = max(self._newest, number)
        if not self._missing:
            self._numbers.clear()  # no order is late now

    def claim(self, subject: Hashable, number: int) -> bool:
        """Whether no later orders have spoken of the subject; notes that these have."""
        if number < self._numbers.get(subject, 0):
            return False
        self._numbers[subject] = number
        return True

    def claim_group(self, group_id: str, number: int) -> bool:
        """As `claim`, of the lease of a group."""
        return self.claim(("group", group_id), number)


def _returned(leased: LeasedGroup) -> LeaseResult:
    lease = leased.lease
    return LeaseResult(
        group_id=lease.group_id,
        attempt=lease.attempt,
        order_number=leased.order_number,
        outcome=LeaseOutcome.RETURNED,
        report=None,
    )
