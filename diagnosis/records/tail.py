"""Reads the whole lines that were appended to a log since the last poll."""

import enum
import itertools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

BLOCK_BYTES = 4 << 20
MARK_BYTES = 64
BATCH_LINES = 256


class TailChange(enum.Enum):
    """How a file has changed since the last poll."""

    SAME = "same"
    GROWN = "grown"
    REPLACED = "replaced"
    """Another file, a shorter one, different bytes before the offset that was read to, or none."""


class Tail:
    """Remembers how far one log was read; an incomplete last line waits for its rest.

    `poll` costs one stat if nothing has changed. After REPLACED the owner starts again with another
    Tail: what was read before is no longer in the file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._file_id: tuple[int, int] | None = None
        self._size = 0
        self._offset = 0
        self._mark = b""

    def poll(self) -> TailChange:
        """Whether there is more to read, without reading it."""
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return TailChange.SAME if self._file_id is None else TailChange.REPLACED
        file_id = (stat.st_dev, stat.st_ino)
        if self._file_id is None:
            self._file_id = file_id
        if file_id != self._file_id:
            return TailChange.REPLACED
        if stat.st_size == self._size:
            return TailChange.SAME
        return TailChange.GROWN if self._mark_matches() else TailChange.REPLACED

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The whole lines not read yet, without their ends, and the offset at which each begins."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            stat = os.fstat(file.fileno())
            if self._file_id not in (None, (stat.st_dev, stat.st_ino)):
                return  # replaced since the last poll; the next one reports it
            self._file_id = (stat.st_dev, stat.st_ino)
            self._size = stat.st_size
            file.seek(self._offset)
            rest = b""
            while block := file.read(min(BLOCK_BYTES, self._size - self._offset - len(rest))):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if not newline:
                    continue
                begin = self._offset
                self._offset += len(whole) + 1
                self._mark = (self._mark + whole[-MARK_BYTES:] + b"\n")[-MARK_BYTES:]
                for line in whole.split(b"\n"):
                    if line:
                        yield begin, line
                    begin += len(line) + 1

    def batches(self) -> Iterator[list[tuple[int, bytes]]]:
        """The same, BATCH_LINES at a time."""
        lines = self.lines()
        while batch := list(itertools.islice(lines, BATCH_LINES)):
            yield batch

    def _mark_matches(self) -> bool:
        """Whether the bytes before the current offset are still those that were read."""
        with self.path.open("rb") as file:
            file.seek(self._offset - len(self._mark))
            return file.read(len(self._mark)) == self._mark


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is not a JSON object."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # bad UTF-8 is a ValueError, as is bad JSON
        return None
    return record if isinstance(record, dict) else None


def read_line(path: pathlib.Path, offset: int, size: int) -> dict[str, Any] | None:
    """The record at an offset; None if the file has changed."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return parse_line(file.read(size))
    except FileNotFoundError:
        return None
