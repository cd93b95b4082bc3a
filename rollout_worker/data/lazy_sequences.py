"""Sequences whose items are made when they are asked for, so that memory does not hold them all."""

import bisect
import itertools
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")

_WRITE_BYTES = 2**20


class LazySequence(Sequence[T]):
    """Items that a function makes of their index; a slice is one of these too."""

    def __init__(self, length: int, item: Callable[[int], T]):
        self._range = range(length)
        self._item = item

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "LazySequence[T]": ...
    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._item(self._range[index])
        part = LazySequence(0, self._item)
        part._range = self._range[index]
        return part


def chained(parts: Sequence[Sequence[T]]) -> LazySequence[T]:
    """The items of all parts, one part after the other."""
    ends = list(itertools.accumulate(map(len, parts)))

    def item(index: int) -> T:
        which = bisect.bisect_right(ends, index)
        return parts[which][index - (ends[which - 1] if which else 0)]

    return LazySequence(ends[-1] if ends else 0, item)


class ByteStrings:
    """Byte strings in a file without a name, which ends with this object or its process.

    They are appended one after the other. Once that is finished, any may be read at any time, by
    several threads. The file lies in the folder for temporary files (TMPDIR).
    """

    def __init__(self, about: str):
        """Args:
        about: begins the message of an error.
        """
        self._about = about
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close).atexit = False
        self._ends = array("Q", (0,))
        self._pending = bytearray()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, value: bytes) -> None:
        """Adds one behind the others.

        Raises:
            ValueError: if the folder for temporary files has no room.
        """
        self._pending += value
        self._ends.append(self._ends[-1] + len(value))
        if len(self._pending) >= _WRITE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Writes what has been appended; raises as `append`."""
        rest = memoryview(self._pending)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ValueError(
                f"{self._about}: its records do not fit in {tempfile.gettempdir()}, the folder for "
                f"temporary files ({error.strerror}): free space there, or name another folder in "
                "TMPDIR"
            ) from error
        self._pending = bytearray()

    def read(self, index: int) -> bytes:
        """One of them, by its index, after `finish`."""
        assert not self._pending
        start, end = self._ends[index], self._ends[index + 1]
        return os.pread(self._file.fileno(), end - start, start)
