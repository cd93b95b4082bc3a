"""Frames: records of bytes with a checksum, as the learner's own files store them.

    frame    44 bytes of prefix, then the body
    prefix   8 bytes length of the body, 32 bytes sha256 of the body, 4 bytes crc32 of those 40

A power loss may cut the write of the last frame of a file: the frame ends with the file, or parts
of it that never reached the disk are zeros (`is_torn`).

All integers are little-endian. `rollout_file.py` and `segment_file.py` define the bodies.
"""

import hashlib
import io
import pathlib
import re
import struct
import zlib

_LENGTH_DIGEST = struct.Struct("<Q32s")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _LENGTH_DIGEST.size + _CRC.size


_SECTOR_BYTES = 512
"""The least that a disk writes at once."""
_LEAST_ZEROS = 16
"""Fewer zeros at the begin or end of a frame may be its content."""
_MAY_BEGIN = re.compile(rb"(?=(?!\0{4})[\s\S]{4}\0{4}[\s\S]{36})")
"""A prefix: no frame has 4 GiB, which is more than gRPC sends in a message."""


class DamagedFile(ValueError):
    """A file is not as it was written; the message names file and record."""


def frame(body: bytes) -> bytes:
    """Returns the body with its prefix."""
    prefix = _LENGTH_DIGEST.pack(len(body), hashlib.sha256(body).digest())
    return prefix + _CRC.pack(zlib.crc32(prefix)) + body


def read_frame(file: io.BufferedReader, where: str) -> bytes | None:
    """The next body; empty at the end of the file, None where that is inside the frame.

    Args:
        file: at the first byte of a frame.
        where: file and record, for the error.

    Raises:
        DamagedFile: if prefix or body do not keep their checksums.
    """
    prefix = file.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None if prefix else b""
    inner = prefix[: _LENGTH_DIGEST.size]
    if _CRC.unpack(prefix[_LENGTH_DIGEST.size :])[0] != zlib.crc32(inner):
        raise DamagedFile(f"{where} is damaged: its length does not match its checksum")
    length, digest = _LENGTH_DIGEST.unpack(inner)
    body = file.read(length)
    if len(body) < length:
        return None
    if hashlib.sha256(body).digest() != digest:
        raise DamagedFile(f"{where} is damaged: its content does not match its checksum")
    return body


def is_torn(path: pathlib.Path, start: int) -> bool:
    """Whether a damaged frame is what a power loss leaves of the last write to a file.

    That is: no frame follows it, and at least one sector of it was never written. A frame whose
    every sector has something in it was written, and has changed since.

    Args:
        path: of the file.
        start: first byte of the frame.
    """
    with path.open("rb") as file:
        file.seek(start)
        rest = file.read()
    if not rest.strip(b"\0"):
        return True
    first = -start % _SECTOR_BYTES or _SECTOR_BYTES
    starts = [0, *range(first, len(rest), _SECTOR_BYTES)]
    sectors = (rest[at:end] for at, end in zip(starts, [*starts[1:], len(rest)], strict=True))
    unwritten = any(len(s) >= _LEAST_ZEROS and not s.strip(b"\0") for s in sectors)
    return unwritten and not _has_frame(rest[1:])


def _has_frame(data: bytes) -> bool:
    """Whether a frame with content begins anywhere in the data."""
    for found in _MAY_BEGIN.finditer(data):
        prefix = data[found.start() : found.start() + PREFIX_BYTES]
        inner = prefix[: _LENGTH_DIGEST.size]
        if _CRC.unpack(prefix[_LENGTH_DIGEST.size :])[0] == zlib.crc32(inner):
            return True
    return False
