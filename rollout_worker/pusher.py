"""Hands finished groups to the learner while the device decodes the next ones.

One thread, one group after the other. A learner that is away or full is waited for, up to a
deadline that names the group; what the learner refuses for another reason than age is an error.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rollout_worker.lease_records import LeaseOutcome, LeaseResult
from services.process import failpoints
from services.process.background import Background
from services.trajectories.client import PackedGroup, PushFailed, TrajectoryClient, pack_group
from services.trajectories.group_report import report_of
from services.trajectories.receipts import StaleGroup
from services.wire.messages import Group

QUEUED_GROUPS = 64
"""Finished groups that may wait; then decoding waits too."""
ATTEMPT_S = 20.0
"""One attempt to push; a learner that was replaced is dialled at the next."""


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """A group to be pushed."""

    group: Group
    samples: Callable[[], tuple[dict[str, Any], ...]]
    """Makes what is logged of it; called in the thread, once the learner has taken it."""


class Pusher:
    """Owns the connection to the learner's trajectory service, and the thread that uses it."""

    def __init__(
        self,
        connect: Callable[[str], TrajectoryClient],
        address: str,
        *,
        timeout_s: float,
        on_result: Callable[[LeaseResult], None],
        on_failure: Callable[[], None],
    ):
        """Args:
        connect: makes a client for an address.
        timeout_s: how long one group may take to be handed over, a restart of the learner
            included.
        on_result: called in the thread for every group that the learner answered.
        """
        self._connect = connect
        self._address = address
        self._client = connect(address)
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._queue: queue.Queue[Finished | None] = queue.Queue(QUEUED_GROUPS)
        self._lock = threading.Lock()
        self._queued: set[tuple[str, int]] = set()
        """Group id and attempt; a lease that was cancelled may come again under the same."""
        self._cancelled: set[tuple[str, int]] = set()
        self._seconds = 0.0
        self._closed = threading.Event()
        self._thread = Background("group-pusher", self._run, on_failure)

    def put(self, finished: Finished) -> None:
        """Queues a group; waits while too many are queued.

        Raises:
            BackgroundFailed: if the thread has failed.
        """
        with self._lock:
            self._queued.add((finished.group.group_id, finished.group.attempt))
        while True:
            self._thread.check()
            try:
                return self._queue.put(finished, timeout=0.5)
            except queue.Full:
                continue

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if an error did."""
        return self._thread.failure

    def check(self) -> None:
        """Raises BackgroundFailed if the thread has failed."""
        self._thread.check()

    def cancel(self, group_id: str, attempt: int) -> None:
        """Drops a group that is still queued, silently."""
        with self._lock:
            self._cancelled |= self._queued & {(group_id, attempt)}

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
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread looks at `_closed` before each group
        self._client.close()

    def _run(self) -> None:
        while (finished := self._queue.get()) is not None and not self._closed.is_set():
            started = time.monotonic()
            group = finished.group
            key = (group.group_id, group.attempt)
            with self._lock:
                self._queued.discard(key)
                cancelled = key in self._cancelled
                self._cancelled.discard(key)
            if not cancelled:
                failpoints.reach("worker.push")
                outcome = self._push(pack_group(group))
                accepted = outcome is LeaseOutcome.ACCEPTED
                self._on_result(
                    LeaseResult(
                        group_id=group.group_id,
                        attempt=group.attempt,
                        outcome=outcome,
                        report=report_of(group),
                        samples=finished.samples() if accepted else (),
                    )
                )
            with self._lock:
                self._seconds += time.monotonic() - started

    def _push(self, packed: PackedGroup) -> LeaseOutcome:
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._lock:
                client, address = self._client, self._address
            left_s = max(0.01, deadline - time.monotonic())
            try:
                return LeaseOutcome(client.push_packed(packed, min(ATTEMPT_S, left_s)).value)
            except StaleGroup:
                return LeaseOutcome.STALE
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            except PushFailed:
                if address == self._address and not self._closed.is_set():
                    raise  # else the connection was closed under the call
