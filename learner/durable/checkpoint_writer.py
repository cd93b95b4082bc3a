"""Has checkpoints written, in the calling thread or in one of its own beside the training.

In the background, the caller waits only for a copy of the state on the host (`copy_to_host`). The
thread makes the certificate of that copy and gives both to `CheckpointFolder`, which names the
folder a checkpoint once all of it is on the disk and was read back: whenever the process ends, a
resume finds this checkpoint whole or the one before it. What may go only after that, such as the
log that the older one needs, is removed by the same thread (`on_certified`).

Beside the state on the devices there is at most one copy of it on the host.
"""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from learner.durable.certificate import Certificate
from learner.durable.checkpoint import CheckpointFailed, CheckpointFolder, SavedCheckpoint
from learner.durable.saved import CLOSE_S, Saved
from learner.update.state import TrainState
from services.process import failpoints

log = logging.getLogger(__name__)


class CheckpointBroken(RuntimeError):
    """A checkpoint was not written, for a reason that is none of the disk's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointJob:
    """What one checkpoint is to hold."""

    step: int
    state: TrainState
    """On the devices, or as `copy_to_host` gives it."""
    record: dict[str, Any]
    """JSON values, which no thread changes any more."""
    certify: Callable[[TrainState], Certificate]
    """Makes the certificate of `state` and `record`."""
    scores: Mapping[int, float | None]
    """As `CheckpointFolder.save` has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteTimes:
    """How long the newest complete checkpoint took."""

    step: int
    blocked_s: float
    """Of the thread that trains: the wait for the checkpoint before, the copy to the host, and
    without a thread of its own the write."""
    write_s: float
    """From the first hash until the folder was complete and older ones were removed."""


class CheckpointWriter:
    """Owns a folder of checkpoints and the thread that writes them; one is written at a time.

    Its methods are for one thread at a time; `writing` and `times` are for any.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        *,
        on_certified: Callable[[int, SavedCheckpoint], list[str]],
        timeout_s: float,
    ):
        """Args:
        on_certified: called with step and result of each complete checkpoint, in the thread that
            wrote it; removes what only older ones needed, and returns what it could not remove.
        timeout_s: bound of each wait for the one that is being written.
        """
        self._folder = folder
        self._on_certified = on_certified
        self._timeout_s = timeout_s
        self._under_way: tuple[int, concurrent.futures.Future[Saved]] | None = None
        self._ended: list[Saved] = []
        self._doing = ""
        self._times: WriteTimes | None = None

    @property
    def writing(self) -> int | None:
        """Step of the checkpoint that is being written in the background; None where none is."""
        under_way = self._under_way
        return None if under_way is None or under_way[1].done() else under_way[0]

    def take_times(self) -> WriteTimes | None:
        """Of the newest complete checkpoint; None where that was taken before."""
        times, self._times = self._times, None
        return times

    def write(self, job: CheckpointJob) -> Saved:
        """Writes a checkpoint in this thread, after the one that is under way.

        Raises:
            CheckpointFailed: if it cannot be written; those before it are untouched.
            CheckpointBroken: if the one before failed for another reason than the disk.
            TimeoutError: if the one before is still being written after timeout_s.
        """
        begun = time.monotonic()
        self.wait()
        return self._write(job, begun, blocked_until=None)

    def submit(self, make_job: Callable[[], CheckpointJob]) -> None:
        """Has a checkpoint written in the background, after the one that is under way.

        Args:
            make_job: called once that one has ended, in this thread, so that there is one copy of
                the state at a time.

        Raises:
            CheckpointBroken, TimeoutError: as `write` does.
        """
        begun = time.monotonic()
        self.wait()
        job = make_job()
        future: concurrent.futures.Future[Saved] = concurrent.futures.Future()
        self._doing = "about to begin"
        self._under_way = (job.step, future)
        # A daemon: a disk that hangs must not keep the process from ending.
        threading.Thread(
            target=self._run,
            args=(job, future, begun, time.monotonic()),
            name="checkpoint",
            daemon=True,
        ).start()

    def take_ended(self) -> list[Saved]:
        """The checkpoints of the background that ended since the last call, oldest first; of one
        that could not be written, why.

        Raises:
            CheckpointBroken: if one failed for another reason than the disk.
        """
        if self.writing is None:
            self.wait()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the checkpoint that is under way, if there is one.

        Args:
            timeout_s: instead of the one that the writer was made with.

        Raises:
            CheckpointBroken: if it failed for another reason than the disk.
            TimeoutError: naming it, the bound, and what the thread is at.
        """
        if self._under_way is None:
            return
        step, future = self._under_way
        bound_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            error = future.exception(bound_s)
        except TimeoutError:
            raise TimeoutError(
                f"the checkpoint of step {step} is still being written after {bound_s:g} s, "
                f"{self._doing}: the disk does not keep up or does not answer; the checkpoint "
                "before it is untouched"
            ) from None
        self._under_way = None
        if error is None:
            self._ended.append(future.result())
        elif isinstance(error, CheckpointFailed):
            self._ended.append(
                Saved(step=step, folder="", not_removed=[], problem=error.strerror or str(error))
            )
        else:
            raise CheckpointBroken(
                f"the checkpoint of step {step} was not written, {self._doing}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Waits for the checkpoint that is under way.

        Raises:
            CheckpointBroken, TimeoutError: as `wait`, after at most CLOSE_S.
        """
        self.wait(min(CLOSE_S, self._timeout_s))

    def _run(
        self,
        job: CheckpointJob,
        future: "concurrent.futures.Future[Saved]",
        begun: float,
        blocked_until: float,
    ) -> None:
        try:
            failpoints.reach("learner.copied")
            future.set_result(self._write(job, begun, blocked_until))
        except Exception as error:  # raised in the training thread, by its next call
            log.warning("the checkpoint of step %d was not written: %s", job.step, error)
            future.set_exception(error)

    def _write(self, job: CheckpointJob, begun: float, blocked_until: float | None) -> Saved:
        started = time.monotonic()
        self._doing = "hashing the state"
        certificate = job.certify(job.state)
        self._doing = "writing and reading back its files"
        saved = self._folder.save(job.step, job.state, job.record, certificate, job.scores)
        self._doing = "removing what older ones needed"
        left = self._on_certified(job.step, saved)
        ended = time.monotonic()
        self._times = WriteTimes(
            step=job.step,
            blocked_s=(ended if blocked_until is None else blocked_until) - begun,
            write_s=ended - started,
        )
        return Saved(
            step=job.step, folder=str(saved.folder), not_removed=[*saved.not_removed, *left]
        )


def copy_to_host(state: TrainState) -> TrainState:
    """The state as numpy arrays of their own, which no later update changes."""
    for leaf in jax.tree.leaves(state):
        leaf.copy_to_host_async()

    def owned(leaf: jax.Array) -> np.ndarray:
        host = np.asarray(leaf)
        # On a CPU that is a view of the buffer, which the next update donates.
        on_cpu = all(device.platform == "cpu" for device in leaf.sharding.device_set)
        return host.copy() if on_cpu else host

    return jax.tree.map(owned, state)
