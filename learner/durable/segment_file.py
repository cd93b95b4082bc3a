"""Segment files: the format of a run's write-ahead log, and how it is read.

`spool.py` owns the log and writes it. A segment is the log from one checkpoint to the next:

    spool/step-00000020.bin   one segment; begins with the checkpoint of step 20 (0: with the run)
    spool/step-00000020-7.bin another one of that step, of a run that resumed from before it

    segment  16 bytes `tandem spool 1 \\n`, a frame (`frames.py`) with the header, one per record
    header   strict JSON: run_id, step, serial
    record   1 byte kind, then
               `i`  JSON: a policy version was issued, with its digest
               `u`  JSON: an update will train: the version it makes, its groups, groups given up
               `a`  JSON: updates that make this version or a later one, and those versions,
                    are void: they could not be repeated exactly
               `g`  a tandem.v1.Group

A segment begins with everything that is still open, so that it needs no earlier one. Serial numbers
rise in the order in which segments were begun, whatever their step. Only the last segment may end
with a frame that a crash or a power loss cut: it was never acknowledged, and the complete frames
before it count. Any other difference from what was written is an error.
"""

import dataclasses
import io
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from learner.durable.frames import DamagedFile, frame, is_torn, read_frame
from services.trajectories import codec
from services.trajectories.id_set import IdSet
from services.wire.messages import Group

MAGIC = b"tandem spool 1 \n"
SEGMENT_NAME = re.compile(r"step-(?P<step>\d{8})(-\d+)?\.bin")
ISSUED, UPDATE, ABANDONED, GROUP = b"i", b"u", b"a", b"g"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """An update that was logged before it trained."""

    policy_version: int
    """Which it makes; an update with nothing left to train on makes none, and the next has the
    same number."""
    group_ids: tuple[str, ...]
    dropped_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenWork:
    """Accepted groups, issued versions and begun updates that no checkpoint may hold yet."""

    issued: dict[int, str]
    """Digest by policy version."""
    updates: tuple[UpdateRecord, ...]
    """In the order in which they were made."""
    groups: dict[str, Group]
    """Accepted groups by group_id, in order of arrival; each only once."""

    def beyond(self, policy_version: int, used: IdSet) -> "OpenWork":
        """What a checkpoint of that version, which has consumed these groups, does not hold."""
        return OpenWork(
            issued=self.issued,
            updates=tuple(
                update
                for update in self.updates
                if update.policy_version > policy_version
                and not any(g in used for g in update.group_ids or update.dropped_ids)
            ),
            groups={name: group for name, group in self.groups.items() if name not in used},
        )


NOTHING_OPEN = OpenWork(issued={}, updates=(), groups={})


@dataclasses.dataclass(frozen=True)
class Segment:
    """One file of a spool."""

    path: pathlib.Path
    step: int
    """Of the checkpoint that it begins with."""
    serial: int
    """-1 where the header cannot be trusted."""
    damage: str = ""
    """What is wrong with the header."""


def find_segments(folder: pathlib.Path, run_id: str) -> list[Segment]:
    """The segments of a spool in the order in which they were begun.

    Raises:
        DamagedFile: if a header is of another run.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if (named := SEGMENT_NAME.fullmatch(path.name)) is None:
            continue
        try:
            with path.open("rb") as file:
                header = _read_header(file, path)
        except DamagedFile as error:
            found.append(Segment(path, int(named["step"]), -1, str(error)))
            continue
        if header.get("run_id") != run_id:
            raise DamagedFile(
                f"{path} is of run {header.get('run_id')!r}, not {run_id!r}: give this run another "
                "run.output_dir"
            )
        found.append(Segment(path, header["step"], header["serial"]))
    return sorted(found, key=lambda segment: segment.serial)


def segments_since(segments: Sequence[Segment], step: int) -> list[Segment]:
    """The segments with everything that was written since the checkpoint of a step.

    If the segment of that checkpoint could not be begun, they start with the one before it. Those
    with a damaged header come first: of steps from there on, since they may be needed.
    """
    before = [segment for segment in segments if segment.step <= step]
    sound = [segment for segment in before if not segment.damage]
    if not sound:
        return before
    first = max(sound, key=lambda segment: (segment.step, segment.serial))
    return [
        segment
        for segment in segments
        if (segment.step >= first.step if segment.damage else segment.serial >= first.serial)
    ]


def read_segments(segments: Sequence[Segment]) -> OpenWork | None:
    """The content of these segments together; None where there is none.

    Raises:
        DamagedFile: naming file and byte.
    """
    if not segments:
        return None
    for segment in segments:
        if segment.damage:
            raise DamagedFile(segment.damage)
    issued: dict[int, str] = {}
    updates: list[UpdateRecord] = []
    groups: dict[str, Group] = {}
    for segment in segments:
        for body, _ in read_segment(segment.path, last=segment is segments[-1]):
            kind, content = body[:1], body[1:]
            if kind == GROUP:
                group = codec.decode_group(content)
                groups.setdefault(group.group_id, group)
                continue
            plain = json.loads(content)
            version = plain["policy_version"]
            if kind == ISSUED:
                issued[version] = plain["digest"]
            elif kind == UPDATE:
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


def read_segment(path: pathlib.Path, *, last: bool) -> Iterator[tuple[bytes, int]]:
    """The bodies of a segment's records, each with the byte behind it.

    Args:
        path: of the segment.
        last: whether it may end with a frame that was cut.

    Raises:
        DamagedFile: naming file and byte.
    """
    with path.open("rb") as file:
        _read_header(file, path)
        for number in itertools.count(1):
            start = file.tell()
            where = f"{path}: record {number} (byte {start})"
            try:
                body = read_frame(file, where)
            except DamagedFile as error:
                if last and is_torn(path, start):
                    return
                raise _damaged(str(error), path) from None
            if body is None and not last:
                raise _damaged(f"{where} is cut short, and a later segment exists", path)
            if not body:
                return
            if body[:1] not in (ISSUED, UPDATE, ABANDONED, GROUP):
                raise DamagedFile(
                    f"{where} is of kind {body[:1]!r}, which this program cannot read"
                )
            yield body, file.tell()


def end_of_header(path: pathlib.Path) -> int:
    """The byte behind the header of a segment."""
    with path.open("rb") as file:
        _read_header(file, path)
        return file.tell()


def _read_header(file: io.BufferedReader, path: pathlib.Path) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise _damaged(f"{path} is no segment of a spool: it does not start as one", path)
    where = f"{path}: the header (byte {len(MAGIC)})"
    try:
        body = read_frame(file, where)
    except DamagedFile as error:
        raise _damaged(str(error), path) from None
    if not body:
        raise _damaged(f"{where} is cut short", path)
    return json.loads(body)


def _damaged(what: str, path: pathlib.Path) -> DamagedFile:
    return DamagedFile(
        f"{what}. Put the file back from a copy, or move {path.parent} away and go on with "
        "--resume: the run then makes the groups again that it had since its last checkpoint"
    )


def records_of(work: OpenWork) -> Iterator[bytes]:
    """The records that a segment begins with: everything that is still open."""
    for version, digest in sorted(work.issued.items()):
        yield issued_record(version, digest)
    for group in work.groups.values():
        yield group_record(group)
    for update in work.updates:
        yield update_record(update)


def issued_record(policy_version: int, digest: str) -> bytes:
    """A version was issued."""
    return _json_record(ISSUED, {"policy_version": policy_version, "digest": digest})


def update_record(update: UpdateRecord) -> bytes:
    """An update will train."""
    return _json_record(UPDATE, dataclasses.asdict(update))


def abandoned_record(policy_version: int) -> bytes:
    """Updates that make this version or a later one are void."""
    return _json_record(ABANDONED, {"policy_version": policy_version})


def group_record(group: Group) -> bytes:
    """A group was accepted."""
    return GROUP + codec.encode_group(group)


def _json_record(kind: bytes, content: dict[str, Any]) -> bytes:
    return kind + json.dumps(content, allow_nan=False).encode()


def opening_bytes(run_id: str, segment: Segment) -> bytes:
    """The first bytes of a segment: magic and header."""
    header = {"run_id": run_id, "step": segment.step, "serial": segment.serial}
    return MAGIC + frame(json.dumps(header).encode())
