"""Has checkpoints written, in the calling thread or in one of its own beside the training.

The caller waits for a copy of the state on the host. Of that copy the certificate is made, and
`CheckpointFolder` names the folder of a checkpoint once all of it is on the disk and was read back:
whenever the process ends, a resume finds this checkpoint whole or the one before it. What may go
only after that, such as the log that the older one needs, is removed by the same thread
(`on_certified`).

Beside the state on the devices there is one copy of it on the host, as `copy_to_host` makes it.
"""

import collections
import dataclasses
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from learner.durable.certificate import Certificate
from learner.durable.checkpoint import CheckpointFailed, CheckpointFolder, SavedCheckpoint
from learner.durable.saved import CLOSE_S, Saved
from learner.update.host_copy import copy_to_host
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
    """On the devices; the writer copies it."""
    record: dict[str, Any]
    """JSON values, which no thread changes any more."""
    certify: Callable[[TrainState], Certificate]
    """Makes the certificate of `state` and `record`."""
    scores: Mapping[int, float | None]
    """As `CheckpointFolder.save` has them."""


class CheckpointWriter:
    """Owns a folder of checkpoints and the thread that writes them; one is written at a time.

    Its methods are for one thread at a time; `writing` is for any. What became of each checkpoint,
    written here or in the background, is in `take_ended`.
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
        self._thread: threading.Thread | None = None
        self._writing: int | None = None
        self._doing = ""
        self._ended: collections.deque[Saved] = collections.deque()
        self._failure: CheckpointBroken | None = None

    @property
    def writing(self) -> int | None:
        """Step of the checkpoint that is being written in the background; None where none is."""
        return self._writing

    def write(self, make_job: Callable[[], CheckpointJob]) -> None:
        """Writes a checkpoint in this thread, after the one that is under way.

        Args:
            make_job: called once that one has ended, in this thread, so that there is one copy of
                the state at a time.

        Raises:
            CheckpointBroken: if one before failed for another reason than the disk; this one is
                written first.
            TimeoutError: if the one before is still being written after timeout_s.
        """
        begun_s = time.monotonic()
        self.wait()
        self._write(_copied(make_job()), begun_s, None)
        self.raise_failure()

    def submit(self, make_job: Callable[[], CheckpointJob]) -> None:
        """Has a checkpoint written in the background, after the one that is under way.

        Args:
            make_job: as `write` has it.

        Raises:
            CheckpointBroken: if one before failed for another reason than the disk.
            TimeoutError: as `write` does.
        """
        begun_s = time.monotonic()
        self.wait()
        self.raise_failure()
        job = _copied(make_job())
        self._doing, self._writing = "about to begin", job.step
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(job, begun_s, time.monotonic()), name="checkpoint", daemon=True
        )
        self._thread.start()

    def take_ended(self) -> list[Saved]:
        """The checkpoints that ended since the last call, oldest first; of one that could not be
        written, why. Waits for none.
        """
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def raise_failure(self) -> None:
        """Raises CheckpointBroken, once, if one failed for another reason than the disk."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the checkpoint that is under way, if there is one.

        Args:
            timeout_s: instead of the one that the writer was made with.

        Raises:
            TimeoutError: naming it, the bound, and what the thread is at.
        """
        thread, bound_s = self._thread, self._timeout_s if timeout_s is None else timeout_s
        if thread is None:
            return
        step = self._writing
        thread.join(bound_s)
        if thread.is_alive():
            raise TimeoutError(
                f"the checkpoint of step {step} is still being written after {bound_s:g} s, "
                f"{self._doing}: the disk does not keep up or does not answer; the checkpoint "
                "before it is untouched"
            )

    def close(self) -> list[Saved]:
        """Waits for the checkpoint that is under way; returns as `take_ended` does.

        Raises:
            CheckpointBroken: if one failed for another reason than the disk.
            TimeoutError: as `wait`, after at most CLOSE_S.
        """
        self.wait(min(CLOSE_S, self._timeout_s))
        self.raise_failure()
        return self.take_ended()

    def _run(self, job: CheckpointJob, begun_s: float, released_s: float) -> None:
        step = job.step
        try:
            failpoints.reach("learner.copied")
            self._write(job, begun_s, released_s)
        except Exception as error:
            self._failure = CheckpointBroken(
                f"the checkpoint of step {step} was not written, {self._doing}: "
                f"{type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error
            log.warning("%s", self._failure)
            _clear_frames(error)
            del job
        finally:
            self._writing = None

    def _write(self, job: CheckpointJob, begun_s: float, released_s: float | None) -> None:
        """Writes a checkpoint, and notes what became of it.

        Args:
            released_s: when the thread that trains went on; None if it does once this returns.
        """
        started_s = time.monotonic()
        problem, not_removed = "", []
        try:
            not_removed = self._complete(job)
        except CheckpointFailed as error:
            problem = error.strerror or str(error)
            log.warning("%s", problem)
            _clear_frames(error)
        ended_s = time.monotonic()
        self._ended.append(
            Saved(
                step=job.step,
                problem=problem,
                not_removed=not_removed,
                blocked_s=(ended_s if released_s is None else released_s) - begun_s,
                write_s=ended_s - started_s,
            )
        )

    def _complete(self, job: CheckpointJob) -> list[str]:
        """Writes a checkpoint and removes what it replaces; returns what could not be removed."""
        self._doing = "hashing the state"
        certificate = job.certify(job.state)
        self._doing = "writing and reading back its files"
        saved = self._folder.save(job.step, job.state, job.record, certificate, job.scores)
        self._doing = "removing what older ones needed"
        return [*saved.not_removed, *self._on_certified(job.step, saved)]


def _copied(job: CheckpointJob) -> CheckpointJob:
    return dataclasses.replace(job, state=copy_to_host(job.state))


def _clear_frames(error: BaseException | None) -> None:
    """Drops the variables of the frames that an error and those before it keep, the copy of the
    state among them; the lines stay.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
