"""Frames: records of bytes with a checksum, as the learner's own files store them.

    frame    44 bytes of prefix, then the body
    prefix   8 bytes length of the body, 32 bytes sha256 of the body, 4 bytes crc32 of those 40

All integers are little-endian. `rollout_file.py` and `segment_file.py` define the bodies.
"""

import hashlib
import io
import struct
import zlib

_LENGTH_DIGEST = struct.Struct("<Q32s")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _LENGTH_DIGEST.size + _CRC.size


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
