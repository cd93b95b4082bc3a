"""Pushes finished groups to the learner while the device decodes the next ones.

One thread pushes one group after the other. It waits for a learner that cannot be reached or whose
buffer is full, up to a deadline; the error then names the group. A group that the learner refuses
as stale is a result; every other refusal is an error.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from rollout_worker.leased_group import LeasedGroup
from rollout_worker.sample_record import Sample
from rollout_worker.worker_records import LeaseOutcome, LeaseResult
from services.process import failpoints
from services.process.background import Background
from services.trajectories.client import PackedGroup, PushFailed, TrajectoryClient, pack_group
from services.trajectories.group_report import report_of
from services.trajectories.receipts import StaleGroup

QUEUED_GROUPS = 64
"""Complete groups that may be queued; when so many are, decoding waits."""
ATTEMPT_S = 20.0
"""Bound of one attempt to push; the next one uses the address of a learner that was replaced."""


class Pusher:
    """Owns the connection to the learner's trajectory service, and the thread that uses it."""

    def __init__(
        self,
        connect: Callable[[str], TrajectoryClient],
        address: str,
        *,
        timeout_s: float,
        samples: Callable[[LeasedGroup], tuple[Sample, ...]],
        on_result: Callable[[LeasedGroup, LeaseResult], None],
        on_failure: Callable[[], None],
    ):
        """Args:
        connect: makes a client for an address.
        timeout_s: how long one group may take to be pushed, a restart of the learner included.
        samples: makes what is logged of a group; called in the thread, once the learner has
            accepted it.
        on_result: called in the thread for every group that the learner answered.
        """
        self._connect = connect
        self._address = address
        self._client = connect(address)
        self._timeout_s = timeout_s
        self._samples = samples
        self._on_result = on_result
        self._queue: queue.Queue[LeasedGroup | None] = queue.Queue(QUEUED_GROUPS)
        self._lock = threading.Lock()
        self._seconds = 0.0
        self.pushing = False
        """Whether the thread has a group that the learner has not answered."""
        self.attempts = 0
        """Attempts to push that have begun."""
        self._closed = threading.Event()
        self._thread = Background("group-pusher", self._run, on_failure)

    def put_group(self, leased: LeasedGroup) -> None:
        """Queues a complete group; waits while too many are queued.

        One that is cancelled while it is queued is dropped silently.

        Raises:
            BackgroundFailed: if the thread has failed.
        """
        while True:
            self._thread.raise_failure()
            try:
                return self._queue.put(leased, timeout=0.5)
            except queue.Full:
                continue

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if an error did."""
        return self._thread.failure

    def check(self) -> None:
        """Raises BackgroundFailed if the thread has failed."""
        self._thread.raise_failure()

    def connect(self, address: str) -> None:
        """Pushes to another address from the next attempt on."""
        with self._lock:
            if address == self._address:
                return
            self._address, old = address, self._client
            self._client = self._connect(address)
        old.close()

    def take_seconds(self) -> float:
        """Seconds spent on packing and pushing since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def close(self) -> None:
        """Ends thread and connection; what is queued stays unpushed."""
        self._closed.set()
        with contextlib.suppress(queue.Full):  # the thread checks `_closed` before each group
            self._queue.put_nowait(None)
        self._client.close()

    def _run(self) -> None:
        while (leased := self._queue.get()) is not None and not self._closed.is_set():
            if leased.cancelled:
                continue
            group = leased.group
            assert group is not None
            started = time.monotonic()
            self.pushing = True
            failpoints.reach("worker.push")
            outcome = self._push(pack_group(group), leased)
            if outcome is None:
                self.pushing = False
                continue
            accepted = outcome is LeaseOutcome.ACCEPTED
            result = LeaseResult(
                group_id=group.group_id,
                attempt=group.attempt,
                order_number=leased.order_number,
                outcome=outcome,
                report=report_of(group),
                samples=self._samples(leased) if accepted else (),
            )
            self.pushing = False
            self._on_result(leased, result)
            with self._lock:
                self._seconds += time.monotonic() - started

    def _push(self, packed: PackedGroup, leased: LeasedGroup) -> LeaseOutcome | None:
        """The learner's answer; None for a group that was cancelled before there was one."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._lock:
                client, address = self._client, self._address
            self.attempts += 1
            left_s = max(0.01, deadline - time.monotonic())
            try:
                return LeaseOutcome(client.push_group(packed, min(ATTEMPT_S, left_s)).value)
            except StaleGroup:
                return LeaseOutcome.STALE
            except TimeoutError:
                if leased.cancelled:
                    return None
                if time.monotonic() >= deadline:
                    raise
            except PushFailed:
                if address == self._address and not self._closed.is_set():
                    raise  # else the connection was closed under the call
