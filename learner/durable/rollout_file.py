"""A file of the groups that a learner trained on, step by step, so that they can train again.

It describes itself, holds no pickle, and every byte has a checksum. All integers are little-endian:

    file     16 bytes `tandem rollouts\\n`, a frame with the header, a frame per step
    frame    as `frames.py` says
    header   strict JSON: RolloutHeader and `format_version`
    step     8 bytes step, 4 bytes number of groups; each group: 4 bytes length, a tandem.v1.Group

Steps rise; a gap is a time without recording. A file may end with a frame that a crash or a power
loss cut: the complete frames before it count. Any other difference is an error.
"""

import dataclasses
import io
import json
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from learner.config import AlgorithmConfig, LearnerConfig, TrainingSettings
from learner.durable.frames import PREFIX_BYTES, DamagedFile, frame, is_torn, read_frame
from services.process.config_section import validated
from services.trajectories import codec
from services.wire.messages import Group

FORMAT_VERSION = 1
MAGIC = b"tandem rollouts\n"

_STEP_GROUPS = struct.Struct("<QI")
_GROUP_BYTES = struct.Struct("<I")
_SECTIONS = {"algorithm": AlgorithmConfig, "learner": LearnerConfig}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutHeader(TrainingSettings):
    """The run that trained on the groups: what a learner needs to do it again."""

    run_id: str
    model_path: str
    """As the run has it: HF folder, .gguf file or hub id."""
    model_folder: str | None
    """Where the weights lay; of a hub id its snapshot, which names the revision. None for .gguf."""
    first_policy_version: int = 0
    """The version that trained on the first step of the file."""


class StepPlace(NamedTuple):
    """The bytes of one step in the file."""

    step: int
    """The policy version that the update made: the step of the run, unless one had no groups."""
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Contents:
    """The content of a file, with every checksum verified."""

    header: RolloutHeader | None
    """None where the file was cut before the end of its header."""
    places: tuple[StepPlace, ...]
    cut_at: int | None
    """First byte of a frame that was cut short; None where the file ends with a whole one."""


class DamagedRollouts(DamagedFile):
    """The file is not as it was written; the message names file and record."""


class RecordingFailed(RuntimeError):
    """A step could not be written."""


def scan_rollouts(path: pathlib.Path) -> Contents:
    """Reads a whole file and verifies it, without decoding its groups.

    Raises:
        OSError: if it cannot be read.
        DamagedRollouts: naming the record, counted from 1, and its byte.
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC[: len(magic)]:
            if is_torn(path, 0):
                return Contents(None, (), 0)
            raise DamagedRollouts(f"{path} is no file of rollouts: it does not start as one")
        header, places, start = None, [], len(MAGIC)
        while True:
            what = "the header" if header is None else f"record {len(places) + 1}"
            body = _read_unless_torn(file, start, f"{path}: {what} (byte {start})")
            if not body:
                cut = body is None or header is None
                return Contents(header, tuple(places), start if cut else None)
            end = start + PREFIX_BYTES + len(body)
            if header is None:
                header = _decode_header(body, path)
            else:
                step = _step_of(body)
                if places and step <= places[-1].step:
                    raise DamagedRollouts(
                        f"{path}: record {len(places) + 1} is of step {step}, after one of step "
                        f"{places[-1].step}"
                    )
                places.append(StepPlace(step, start, end))
            start = end


def read_groups(path: pathlib.Path, place: StepPlace) -> list[Group]:
    """The groups of one step, in the order in which the learner took them.

    Raises:
        DamagedRollouts: if they are not what was written.
    """
    where = f"{path}: step {place.step} (byte {place.start})"
    with path.open("rb") as file:
        file.seek(place.start)
        body = _read(file, where)
    if not body:
        raise DamagedRollouts(f"{where} is gone: the file changed while it was read")
    _, count = _STEP_GROUPS.unpack_from(body)
    groups, at = [], _STEP_GROUPS.size
    for _ in range(count):
        (size,) = _GROUP_BYTES.unpack_from(body, at)
        at += _GROUP_BYTES.size
        groups.append(codec.decode_group(body[at : at + size]))
        at += size
    return groups


class RolloutRecorder:
    """Appends the steps of one run to its file.

    A resumed run continues the file: the first step that it records removes that step and later
    ones, whose updates the resume has undone. If the run's settings have changed, the file is
    renamed to the first free `<stem>.N<suffix>`, and a new one begins.
    """

    def __init__(self, path: pathlib.Path, header: RolloutHeader):
        """Args:
            path: made with the first step.
            header: of the run as it is now; its first_policy_version is filled in later.

        Raises:
            DamagedRollouts: if there is a file already that cannot be trusted.
        """
        self._path = path
        self._header = header
        self._places: list[StepPlace] = []
        self._other_settings = False
        if not path.exists():
            return
        try:
            found = scan_rollouts(path)
        except DamagedRollouts as error:
            raise DamagedRollouts(
                f"{error}: move the file away to record a new one, or set log.record_rollouts=false"
            ) from error
        self._places = list(found.places)
        if found.header is not None:
            before = dataclasses.replace(found.header, first_policy_version=0)
            self._other_settings = before != dataclasses.replace(header, first_policy_version=0)

    def append(self, policy_version: int, groups: Sequence[Group]) -> None:
        """Writes one step; it has reached the operating system when this returns.

        Args:
            policy_version: the version that trains on the groups.
            groups: as the learner took them, in its order.

        Raises:
            RecordingFailed: if the disk is full, or the file cannot be written for another reason.
        """
        step = policy_version + 1
        written = frame(_encode_step(step, groups))
        try:
            if self._other_settings:
                self._path.rename(self._free_name())
                self._other_settings, self._places = False, []
            self._places = [place for place in self._places if place.step < step]
            if not self._places:
                self._begin(policy_version)
            with self._path.open("r+b") as file:
                start = self._places[-1].end if self._places else file.seek(0, io.SEEK_END)
                file.seek(start)
                file.truncate()
                file.write(written)
        except OSError as error:
            raise RecordingFailed(
                f"cannot record step {step} in {self._path}: {error.strerror}: make room, or set "
                "log.record_rollouts=false, and go on with --resume"
            ) from error
        self._places.append(StepPlace(step, start, start + len(written)))

    def _begin(self, policy_version: int) -> None:
        header = dataclasses.replace(self._header, first_policy_version=policy_version)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(MAGIC + frame(_encode_header(header)))

    def _free_name(self) -> pathlib.Path:
        number = 1
        while True:
            name = self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")
            if not name.exists():
                return name
            number += 1


def plain_header(header: RolloutHeader) -> dict[str, Any]:
    """A header as JSON values."""
    plain = {field.name: getattr(header, field.name) for field in dataclasses.fields(header)}
    return plain | {name: plain[name].model_dump(mode="json") for name in _SECTIONS}


def header_of(plain: Mapping[str, Any]) -> RolloutHeader:
    """The header that `plain_header` made these values of.

    Raises:
        ValueError, KeyError, TypeError: if it did not.
    """
    sections = {name: validated(kind, plain[name]) for name, kind in _SECTIONS.items()}
    return RolloutHeader(**{**plain, **sections})


def _encode_header(header: RolloutHeader) -> bytes:
    plain = {"format_version": FORMAT_VERSION, **plain_header(header)}
    return json.dumps(plain, allow_nan=False).encode()


def _decode_header(body: bytes, path: pathlib.Path) -> RolloutHeader:
    try:
        plain: dict[str, Any] = json.loads(body)
        version = plain.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version is {version}, this program reads {FORMAT_VERSION}")
        return header_of(plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedRollouts(f"{path}: the header cannot be used: {error}") from error


def _encode_step(step: int, groups: Sequence[Group]) -> bytes:
    parts = [_STEP_GROUPS.pack(step, len(groups))]
    for group in groups:
        raw = codec.encode_group(group)
        parts += [_GROUP_BYTES.pack(len(raw)), raw]
    return b"".join(parts)


def _step_of(body: bytes) -> int:
    return _STEP_GROUPS.unpack_from(body)[0]


def _read_unless_torn(file: io.BufferedReader, start: int, where: str) -> bytes | None:
    try:
        return _read(file, where)
    except DamagedRollouts:
        if is_torn(pathlib.Path(file.name), start):
            return None
        raise


def _read(file: io.BufferedReader, where: str) -> bytes | None:
    try:
        return read_frame(file, where)
    except DamagedFile as error:
        raise DamagedRollouts(str(error)) from error
