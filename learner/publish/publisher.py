"""Publication of policy versions in a thread of its own.

The training thread only makes a snapshot on the devices, which is one cast of the parameters. The
publisher's thread copies it to the host, hashes it and makes it visible to the workers, which read
from host memory: no training step waits for a worker.

Beside the policy there are at most two snapshots on the devices, the one that is being copied and
one that waits. Each is one copy of the model in the wire dtype. It is freed tensor by tensor as it
is copied, or shared as a whole with a rollout worker in the same process. On the host a version is
written straight to its place in the weight store; besides, COPY_THREADS tensors are in flight.
"""

import concurrent.futures
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable

import jax
import numpy as np

from learner.publish.snapshot import Snapshot
from learner.update.host_copy import begin_transfer
from services.process import failpoints
from services.weights.digest import layout
from services.weights.publication import Publication
from services.weights.store import WeightStore
from services.wire.messages import WeightManifest

COPY_THREADS = 4
"""Tensors that are copied and hashed at the same time."""


class PublishFailed(RuntimeError):
    """A version did not reach the workers; `__cause__` has the error with its traceback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishStats:
    """Duration and size of one publication, in the publisher's thread."""

    policy_version: int
    nbytes: int
    waited_s: float
    """From the snapshot until its copy began."""
    copy_s: float
    """Devices to host, checksums included."""
    total_s: float
    """From the start of the copy until the version was visible to the workers."""

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes copied and hashed a second."""
        return self.nbytes / 1e9 / self.copy_s if self.copy_s else 0.0


@dataclasses.dataclass(frozen=True)
class _Job:
    snapshot: Snapshot
    taken_s: float


class Publisher:
    """Owns the thread between the devices and the weight store.

    `submit` and `close` are for the training thread, the others for any.
    """

    def __init__(
        self,
        make_snapshot: Callable[[], Snapshot],
        store: WeightStore,
        on_issued: Callable[[int, str], None],
        *,
        timeout_s: float = 600.0,
        share: Callable[[Snapshot, WeightManifest], None] | None = None,
    ):
        """Args:
        make_snapshot: of the current policy; called by `submit`, in its thread.
        store: where the versions are published.
        on_issued: called with version and digest before the version becomes visible; what it
            raises fails the publication.
        timeout_s: bound of `submit`'s wait for the snapshots before.
        share: called with every snapshot once its version is visible, and owns it from then on;
            without it a snapshot is freed as it is copied.
        """
        self._make_snapshot = make_snapshot
        self._store = store
        self._on_issued = on_issued
        self._timeout_s = timeout_s
        self._share = share
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._copying: int | None = None
        self._doing = ""
        self._submitted = self._published = -1
        self._failure: PublishFailed | None = None
        self._closed = False
        self.tensors_copied = 0
        """Of all versions since the start."""
        self.last_stats: PublishStats | None = None
        """Of the newest version that was published."""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def submit(self, policy_version: int) -> None:
        """Makes a snapshot of the policy, and queues it for the publisher's thread.

        Waits only while an earlier snapshot is queued.

        Args:
            policy_version: the current one; higher than every one before.

        Raises:
            PublishFailed: if this or an earlier version could not be published.
            TimeoutError: if the snapshot before is still queued after timeout_s.
            ValueError: if the policy is at another version.
        """
        self._wait_for(lambda: not self._waiting, self._timeout_s, f"snapshot {policy_version}")
        snapshot = self._make_snapshot()
        if snapshot.policy_version != policy_version:
            raise ValueError(
                f"asked to publish policy version {policy_version}, but the policy is at "
                f"{snapshot.policy_version}"
            )
        with self._changed:
            self._waiting.append(_Job(snapshot, time.monotonic()))
            self._submitted = policy_version
            self._changed.notify_all()

    def wait(self, policy_version: int, timeout_s: float) -> None:
        """Returns once this version, or a newer one, is visible to the workers.

        Raises:
            PublishFailed: if it, or one before it, could not be published.
            TimeoutError: saying what the thread was doing.
            ValueError: if it was not submitted.
        """
        if policy_version > self._submitted:
            raise ValueError(
                f"policy version {policy_version} was not submitted; {self._submitted} is the "
                "newest that was"
            )
        self._wait_for(
            lambda: self._published >= policy_version, timeout_s, f"policy version {policy_version}"
        )

    @property
    def busy(self) -> bool:
        """Whether the thread is at a version."""
        return self._copying is not None

    def raise_failure(self) -> None:
        """Raises PublishFailed if a version could not be published, at every call from then on."""
        if self._failure is not None:
            raise self._failure

    def close(self, timeout_s: float = 30.0) -> None:
        """Publishes what was submitted, ends the thread, and raises as `wait` does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wait_for(lambda: self._published >= self._submitted, timeout_s, "the last version")
        self._thread.join(timeout_s)

    def _wait_for(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or done(), timeout_s)
            self.raise_failure()
            if not done():
                raise TimeoutError(
                    f"{what} waited {timeout_s:g} s for the publisher, which is {self._activity()}"
                )

    def _activity(self) -> str:
        if self._copying is None:
            return "idle"
        return f"at policy version {self._copying}, {self._doing}"

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                stats = self._publish(job)
            except Exception as error:  # raised in the training thread, by its next call
                failure = PublishFailed(
                    f"policy version {job.snapshot.policy_version} was not published, "
                    f"{self._doing}: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                with self._changed:
                    self._failure, self._copying = failure, None
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self.last_stats = stats
                self._published, self._copying = stats.policy_version, None
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            job = self._waiting.popleft()
            self._copying, self._doing = job.snapshot.policy_version, "copying its tensors"
            self._changed.notify_all()
            return job

    def _publish(self, job: _Job) -> PublishStats:
        started = time.monotonic()
        snapshot, nbytes = job.snapshot, job.snapshot.nbytes
        publication = self._store.begin(snapshot.policy_version, layout(snapshot.tensors))
        try:
            self._copy(snapshot, publication)
            copied = time.monotonic()
            self._doing = "about to commit it"
            failpoints.reach("learner.publish")
            canary = None if snapshot.probe is None else snapshot.probe.record()
            self._doing = "issuing its digest"
            manifest = publication.commit(
                before_visible=lambda made: self._on_issued(made.policy_version, made.digest),
                canary=canary,
            )
        except Exception:
            publication.abort()
            raise
        if self._share is not None:
            self._doing = "sharing it with the worker of this process"
            self._share(snapshot, manifest)
        return PublishStats(
            policy_version=snapshot.policy_version,
            nbytes=nbytes,
            waited_s=started - job.taken_s,
            copy_s=copied - started,
            total_s=time.monotonic() - started,
        )

    def _copy(self, snapshot: Snapshot, publication: Publication) -> None:
        """Copies every tensor to its place; raises the first error."""
        keep = self._share is not None
        with concurrent.futures.ThreadPoolExecutor(COPY_THREADS, "publish-copy") as pool:
            copies = {
                pool.submit(copy_tensor, name, array, publication, keep=keep): name
                for name, array in snapshot.tensors.items()
            }
            try:
                for copy in concurrent.futures.as_completed(copies):
                    if copy.exception() is not None:
                        self._doing = f"copying tensor {copies[copy]!r}"
                    copy.result()
                    self.tensors_copied += 1
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def copy_tensor(
    name: str, array: jax.Array, publication: Publication, *, keep: bool = False
) -> None:
    """Copies a tensor's shards to their places, each distinct one once, then frees the array.

    Args:
        keep: does not free the array, since it is shared.
    """
    for shard in begin_transfer(array):
        publication.write(name, shard.index, np.asarray(shard.data))
    if not keep:
        array.delete()
