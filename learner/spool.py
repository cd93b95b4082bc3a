"""The write-ahead log of a run: what the learner has taken on since its last checkpoint.

A group is written here, and is on the disk, before its worker hears that it was accepted; an update
is written here before it trains. A learner that died goes on from a checkpoint and this log.

    spool/step-00000020.bin   one segment; begins with the checkpoint of step 20 (0: with the run)

    segment  16 bytes `tandem spool 1 \\n`, a frame with the header, a frame per record (`frames.py`)
    header   strict JSON: run_id, step, serial
    record   1 byte kind, then
               `i`  JSON: a policy version was issued, with its digest
               `u`  JSON: an update will train: the version it makes, its groups, groups given up
               `a`  JSON: updates that make this version or a later one, and what was issued of
                    those, are void: the run took another course
               `g`  a tandem.v1.Group

A segment begins with everything that is still open, so that it needs none before it. Serials rise
from one to the next; each holds from where it was begun, whatever its step. Only the last may end
inside a frame, cut by a crash: what is whole before it counts. Anything else that is not as it was
written is damage, and an error.
"""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from learner.frames import DamagedFile, frame, read_frame
from services import codec
from services.messages import Group

MAGIC = b"tandem spool 1 \n"
_SEGMENT = re.compile(r"step-(\d{8})\.bin")
_WRITING = ".writing"
_ISSUED, _UPDATE, _ABANDONED, _GROUP = b"i", b"u", b"a", b"g"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """An update that was about to train."""

    policy_version: int
    """Which it makes; an update with nothing left to train on makes none, and the next has the
    same number."""
    group_ids: tuple[str, ...]
    dropped_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenWork:
    """What a spool holds: all that was promised and may not be in a checkpoint yet."""

    issued: dict[int, str]
    """Digest by policy version."""
    updates: tuple[UpdateRecord, ...]
    """In the order in which they were made."""
    groups: dict[str, Group]
    """Accepted groups by group_id, in order of arrival; each only once."""

    def beyond(self, policy_version: int, consumed: Iterable[str]) -> "OpenWork":
        """What is not in a checkpoint of that version, which has used these groups up."""
        used = set(consumed)
        return OpenWork(
            issued=self.issued,
            updates=tuple(
                update
                for update in self.updates
                if update.policy_version > policy_version and used.isdisjoint(update.group_ids)
            ),
            groups={name: group for name, group in self.groups.items() if name not in used},
        )


NOTHING_OPEN = OpenWork(issued={}, updates=(), groups={})


class SpoolFailed(OSError):
    """A record could not be made durable; what it was to say did not happen."""


class Spool:
    """Owns the spool of one run; only one process may write to it. Safe from any thread."""

    def __init__(self, folder: str | os.PathLike, run_id: str):
        """Looks at what is there, and writes nothing.

        Args:
            folder: made with the first segment.
            run_id: stands in every segment.

        Raises:
            DamagedFile: if the header of a segment cannot be trusted, or is of another run.
        """
        self._folder = pathlib.Path(folder).absolute()
        self._run_id = run_id
        self._lock = threading.Lock()
        self._segments = find_segments(self._folder, run_id)
        self._descriptor: int | None = None
        self._end = 0
        self._torn = False
        """Bytes of a record that failed may lie behind the end."""
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the last record could not be written; empty where it could."""
        return self._problem

    @property
    def is_new(self) -> bool:
        """No segment was ever begun."""
        return not self._segments

    def read(self, step: int) -> OpenWork | None:
        """What was written since the checkpoint of a step; None where nothing was.

        Args:
            step: of the checkpoint to go on from; 0 where there is none.

        Raises:
            DamagedFile: naming file and byte.
        """
        with self._lock:
            return read_segments(segments_since(self._segments, step))

    def open_last(self) -> None:
        """Goes on in the last segment, without what a crash cut short at its end.

        Raises:
            DamagedFile: naming file and byte.
            SpoolFailed: if it cannot be opened.
        """
        with self._lock:
            path = self._segments[-1].path
            _, end = read_segment(path, last=True)
            with self._durably(f"open {path}"):
                self._descriptor = os.open(path, os.O_WRONLY)
                os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, end, os.SEEK_SET)
            self._end = end

    def rotate(self, step: int, still_open: Callable[[], OpenWork]) -> None:
        """Begins the segment of a checkpoint that has just been written.

        It takes effect whole or not at all; where it fails, the segment before goes on.

        Args:
            step: of the checkpoint; 0 where a run begins without one.
            still_open: asked while no record can be written: what the segment begins with. It
                must know of a group before that is written here.

        Raises:
            SpoolFailed: if there is no room for it.
        """
        with self._lock:
            serial = self._segments[-1].serial + 1 if self._segments else 0
            segment = Segment(self._folder / f"step-{step:08d}.bin", step, serial)
            with self._durably(f"begin {segment.path}"):
                self._begin(segment, still_open())

    def prune(self, oldest_step: int) -> None:
        """Removes segments that no checkpoint from that step on needs."""
        with self._lock:
            kept = segments_since(self._segments, oldest_step)
            for segment in self._segments:
                if segment not in kept:
                    segment.path.unlink(missing_ok=True)
            self._segments = kept

    def issued(self, policy_version: int, digest: str) -> None:
        self._append(_issued_body(policy_version, digest))

    def update(self, update: UpdateRecord) -> None:
        self._append(_json(_UPDATE, dataclasses.asdict(update)))

    def abandoned(self, policy_version: int) -> None:
        self._append(_json(_ABANDONED, {"policy_version": policy_version}))

    def group(self, group: Group) -> None:
        self._append(_GROUP + codec.encode_group(group))

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _append(self, body: bytes) -> None:
        """One record, on the disk when this returns; none of it where it fails.

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
        """Takes away what a record that failed has left."""
        if self._torn and self._descriptor is not None:
            os.ftruncate(self._descriptor, self._end)
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            self._torn = False

    def _begin(self, segment: "Segment", still_open: OpenWork) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        writing = segment.path.with_name(segment.path.name + _WRITING)
        header = {"run_id": self._run_id, "step": segment.step, "serial": segment.serial}
        try:
            with writing.open("wb") as file:
                file.write(MAGIC + frame(json.dumps(header).encode()))
                for body in _bodies(still_open):
                    file.write(frame(body))
                file.flush()
                os.fsync(file.fileno())
                end = file.tell()
            descriptor = os.open(writing, os.O_WRONLY)
        except OSError:
            with contextlib.suppress(OSError):
                writing.unlink(missing_ok=True)
            raise
        os.lseek(descriptor, end, os.SEEK_SET)
        writing.replace(segment.path)
        _sync_folder(self._folder)
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._trim()  # the segment before must not end inside a frame
            os.close(self._descriptor)
        self._descriptor, self._end, self._torn = descriptor, end, False
        self._segments = [*(s for s in self._segments if s.path != segment.path), segment]

    @contextlib.contextmanager
    def _durably(self, doing: str) -> Iterator[None]:
        """Keeps what went wrong for `problem`, and raises it as SpoolFailed."""
        try:
            yield
        except OSError as error:
            self._problem = f"cannot {doing}: {error.strerror}"
            with contextlib.suppress(OSError):
                self._trim()
            raise SpoolFailed(error.errno, self._problem) from error
        self._problem = ""


@dataclasses.dataclass(frozen=True)
class Segment:
    """One file of a spool."""

    path: pathlib.Path
    step: int
    """Of the checkpoint that it begins with."""
    serial: int


def find_segments(folder: pathlib.Path, run_id: str) -> list[Segment]:
    """The segments of a spool in the order in which they were begun.

    Raises:
        DamagedFile: if a header cannot be trusted, or is of another run.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if not _SEGMENT.fullmatch(path.name):
            continue
        with path.open("rb") as file:
            header = _read_header(file, path)
        if header.get("run_id") != run_id:
            raise DamagedFile(
                f"{path} is of run {header.get('run_id')!r}, not {run_id!r}: give this run another "
                "run.output_dir"
            )
        found.append(Segment(path, header["step"], header["serial"]))
    return sorted(found, key=lambda segment: segment.serial)


def segments_since(segments: Sequence[Segment], step: int) -> list[Segment]:
    """Those that hold what was written since the checkpoint of a step.

    A checkpoint whose own segment could not be begun is followed by the one before it.
    """
    before = [segment for segment in segments if segment.step <= step]
    if not before:
        return []
    first = max(before, key=lambda segment: segment.step)
    return [segment for segment in segments if segment.serial >= first.serial]


def read_segments(segments: Sequence[Segment]) -> OpenWork | None:
    """What these segments say together; None where there is none.

    Raises:
        DamagedFile: naming file and byte.
    """
    if not segments:
        return None
    issued: dict[int, str] = {}
    updates: list[UpdateRecord] = []
    groups: dict[str, Group] = {}
    for segment in segments:
        bodies, _ = read_segment(segment.path, last=segment is segments[-1])
        for body in bodies:
            kind, content = body[:1], body[1:]
            if kind == _GROUP:
                group = codec.decode_group(content)
                groups.setdefault(group.group_id, group)
                continue
            plain = json.loads(content)
            version = plain["policy_version"]
            if kind == _ISSUED:
                issued[version] = plain["digest"]
            elif kind == _UPDATE:
                update = UpdateRecord(
                    policy_version=version,
                    group_ids=tuple(plain["group_ids"]),
                    dropped_ids=tuple(plain["dropped_ids"]),
                )
                if update not in updates:
                    updates.append(update)
            else:
                updates = [update for update in updates if update.policy_version < version]
                issued = {v: digest for v, digest in issued.items() if v < version}
    return OpenWork(issued=issued, updates=tuple(updates), groups=groups)


def read_segment(path: pathlib.Path, *, last: bool) -> tuple[list[bytes], int]:
    """The bodies of a segment's records, and the byte behind the last whole one.

    Args:
        path: of the segment.
        last: whether it may end inside a frame.

    Raises:
        DamagedFile: naming file and byte.
    """
    bodies = []
    with path.open("rb") as file:
        _read_header(file, path)
        while True:
            start = file.tell()
            where = f"{path}: record {len(bodies) + 1} (byte {start})"
            body = read_frame(file, where)
            if body and body[:1] not in (_ISSUED, _UPDATE, _ABANDONED, _GROUP):
                raise DamagedFile(
                    f"{where} is of kind {body[:1]!r}, which this program cannot read"
                )
            if body is None and not last:
                raise DamagedFile(f"{where} is cut short, and a later segment exists")
            if not body:
                return bodies, start
            bodies.append(body)


def _read_header(file: io.BufferedReader, path: pathlib.Path) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise DamagedFile(f"{path} is no segment of a spool: it does not start as one")
    body = read_frame(file, f"{path}: the header (byte {len(MAGIC)})")
    if not body:
        raise DamagedFile(f"{path}: the header (byte {len(MAGIC)}) is cut short")
    return json.loads(body)


def _bodies(work: OpenWork) -> Iterator[bytes]:
    """The records that say what is open."""
    for version, digest in sorted(work.issued.items()):
        yield _issued_body(version, digest)
    for group in work.groups.values():
        yield _GROUP + codec.encode_group(group)
    for update in work.updates:
        yield _json(_UPDATE, dataclasses.asdict(update))


def _issued_body(policy_version: int, digest: str) -> bytes:
    return _json(_ISSUED, {"policy_version": policy_version, "digest": digest})


def _json(kind: bytes, content: dict[str, Any]) -> bytes:
    return kind + json.dumps(content, allow_nan=False).encode()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
