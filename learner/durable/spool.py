"""The spool: the write-ahead log of what the learner has accepted since its last checkpoint.

A group is written here, and is on the disk, before its worker is told that it was accepted; an
update is written here before it trains. A learner that died continues from a checkpoint and this
log. Here is the one process that writes it; `segment_file.py` has the format of its files.
"""

import contextlib
import errno
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

from learner.durable.frames import frame
from learner.durable.segment_file import (
    OpenWork,
    Segment,
    UpdateRecord,
    abandoned_record,
    end_of_header,
    find_segments,
    group_record,
    issued_record,
    opening_bytes,
    read_segment,
    read_segments,
    records_of,
    segments_since,
    update_record,
)
from services.process.driver_lease import LEASE_S
from services.process.file_lock import lock_file
from services.process.whole_file import make_folder, sync_folder, whole_file
from services.wire.messages import Group

log = logging.getLogger(__name__)

CLAIM_S = LEASE_S + 60.0
"""How long to wait for an earlier learner process to end: one that is cut off from the driver ends
when its lease is over."""


class SpoolFailed(OSError):
    """A record could not be made durable; the caller must act as if it was never written."""


class Spool:
    """Owns the spool of one run; only one process may write to it. Safe from any thread."""

    def __init__(self, folder: str | os.PathLike, run_id: str):
        """Reads the headers of existing segments, and writes nothing.

        Args:
            folder: made with the first segment.
            run_id: stands in every segment.

        Raises:
            DamagedFile: if a segment is of another run.
        """
        self._folder = pathlib.Path(folder).absolute()
        self._run_id = run_id
        self._lock = threading.Lock()
        self._segments = find_segments(self._folder, run_id)
        self._claimed: int | None = None
        self._descriptor: int | None = None
        self._end = 0
        self._torn = False
        """Whether bytes of a failed record may lie behind the end."""
        self._problem = ""

    def claim(self, timeout_s: float = CLAIM_S) -> None:
        """Locks the spool against other processes, until this one closes it or ends.

        A learner that was declared dead may still run for a moment, and write.

        Raises:
            SpoolFailed: if another process holds the lock.
        """
        path = self._folder.with_name(f"{self._folder.name}.lock")
        deadline = time.monotonic() + timeout_s
        with self._lock, self._durably(f"claim {path}"):
            if self._claimed is not None:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as undo:
                claimed = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
                undo.callback(os.close, claimed)
                while True:
                    try:
                        if not lock_file(claimed):
                            log.warning("%s: this file system knows no locks", path)
                        break
                    except BlockingIOError:
                        if time.monotonic() >= deadline:
                            raise OSError(
                                errno.EBUSY,
                                f"another learner of this run has held it for {timeout_s:g} s",
                            ) from None
                        time.sleep(0.05)
                self._segments = find_segments(self._folder, self._run_id)
                self._claimed = claimed
                undo.pop_all()

    @property
    def problem(self) -> str:
        """Why the last record could not be written; empty where it could."""
        return self._problem

    @property
    def is_new(self) -> bool:
        """Whether no segment was ever begun."""
        return not self._segments

    def covers(self, step: int) -> bool:
        """Whether the segments reach back to the checkpoint of that step."""
        return bool(segments_since(self._segments, step))

    def read(self, step: int) -> OpenWork | None:
        """What was written since the checkpoint of a step; None where nothing was.

        Args:
            step: of the checkpoint to continue from; 0 where there is none.

        Raises:
            DamagedFile: naming file and byte.
        """
        with self._lock:
            return read_segments(segments_since(self._segments, step))

    def open_last(self) -> str:
        """Continues the last segment, without a record that a crash cut at its end.

        Returns:
            What was cut off; empty where nothing was.

        Raises:
            DamagedFile: naming file and byte.
            SpoolFailed: if it cannot be opened.
        """
        with self._lock:
            path = self._segments[-1].path
            ends = [end for _, end in read_segment(path, last=True)]
            end = ends[-1] if ends else end_of_header(path)
            with self._durably(f"open {path}"):
                self._descriptor = os.open(path, os.O_WRONLY)
                cut = os.fstat(self._descriptor).st_size - end
                os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, end, os.SEEK_SET)
            self._end = end
        if not cut:
            return ""
        cut_off = (
            f"{path}: cut {cut} bytes off its end (from byte {end}), a record that was being "
            "written when the machine or the learner stopped and that nothing counts on"
        )
        log.warning(cut_off)
        return cut_off

    def rotate(self, step: int, still_open: Callable[[], OpenWork]) -> None:
        """Begins the segment of a checkpoint, at the moment whose state that is to hold.

        That need not be written yet. It is atomic: where it fails, the segment before stays in
        use.

        Args:
            step: of the checkpoint; 0 where a run begins without one.
            still_open: returns what the segment begins with; called while no record can be
                written. It must include a group before that is written here.

        Raises:
            SpoolFailed: if there is no room for it.
        """
        with self._lock:
            serial = self._segments[-1].serial + 1 if self._segments else 0
            path = self._folder / f"step-{step:08d}.bin"
            if path.exists():
                path = path.with_name(f"step-{step:08d}-{serial}.bin")
            segment = Segment(path, step, serial)
            with self._durably(f"begin {segment.path}"):
                self._begin(segment, still_open())

    def prune(self, oldest_step: int) -> list[str]:
        """Removes segments that no checkpoint from that step on needs, and those half begun; none
        where the segment of that checkpoint is not there.

        Returns:
            Which could not be removed, each with the reason; they do no harm.
        """
        with self._lock:
            kept = segments_since(self._segments, oldest_step) or self._segments
            unneeded = [segment.path for segment in self._segments if segment not in kept]
            stuck = []
            for path in (*unneeded, *self._folder.glob(".step-*.part")):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    stuck.append(f"{path} cannot be removed: {error.strerror}")
            self._segments = kept
            return stuck

    def write_issued(self, policy_version: int, digest: str) -> None:
        """Logs that a version is issued; raises SpoolFailed, as the next three methods do."""
        self._append(issued_record(policy_version, digest))

    def write_update(self, update: UpdateRecord) -> None:
        """Logs that an update will train."""
        self._append(update_record(update))

    def write_abandoned(self, policy_version: int) -> None:
        """Logs that updates which make this version or later ones are void."""
        self._append(abandoned_record(policy_version))

    def write_group(self, group: Group) -> None:
        """Logs that a group is accepted."""
        self._append(group_record(group))

    def close(self) -> None:
        """Closes the last segment and releases the lock."""
        with self._lock:
            for descriptor in (self._descriptor, self._claimed):
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptor = self._claimed = None

    def _append(self, body: bytes) -> None:
        """Writes one record, on the disk when this returns; nothing of it remains if it fails.

        Raises:
            SpoolFailed: if the disk is full, or cannot be written for another reason.
        """
        written = frame(body)
        with self._lock:
            if self._descriptor is None:
                raise SpoolFailed(f"no segment of the spool {self._folder} is open")
            with self._durably(f"write to {self._segments[-1].path}"):
                self._trim()
                self._torn = True
                _write_all(self._descriptor, written)
                os.fdatasync(self._descriptor)
                self._torn = False
            self._end += len(written)

    def _trim(self) -> None:
        """Removes the bytes of a record that failed."""
        if self._torn and self._descriptor is not None:
            os.ftruncate(self._descriptor, self._end)
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            self._torn = False

    def _begin(self, segment: Segment, still_open: OpenWork) -> None:
        make_folder(self._folder)
        with contextlib.ExitStack() as undo:
            with whole_file(segment.path, sync=True) as file:
                file.write(opening_bytes(self._run_id, segment))
                for body in records_of(still_open):
                    file.write(frame(body))
                end = file.tell()
                descriptor = os.dup(file.fileno())  # shares the position, which is the end
                undo.callback(os.close, descriptor)
            # Left there, it would hide from a resume what the segment before receives from now on.
            undo.callback(segment.path.unlink, missing_ok=True)
            sync_folder(self._folder)
            undo.pop_all()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._trim()  # the segment before must not end inside a frame
            os.close(self._descriptor)
        self._descriptor, self._end, self._torn = descriptor, end, False
        self._segments.append(segment)

    @contextlib.contextmanager
    def _durably(self, doing: str) -> Iterator[None]:
        """Records an OSError in `problem`, and raises it as SpoolFailed."""
        try:
            yield
        except OSError as error:
            self._problem = f"cannot {doing}: {error.strerror}"
            with contextlib.suppress(OSError):
                self._trim()
            raise SpoolFailed(error.errno, self._problem) from error
        self._problem = ""


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
