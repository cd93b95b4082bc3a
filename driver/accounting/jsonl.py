"""Append-only logs of one JSON object a line, strict JSON, rewound at a resume without loss.

Values are written as `services.wire.strict_json` says; a line lists the keys of numbers that are
not finite under `nonfinite`.
"""

import io
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from services.wire.strict_json import strict


def strict_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that strict JSON can hold, with `nonfinite` naming what had to become text.

    Raises:
        ValueError: as `strict`.
    """
    copy, nonfinite = strict(record)
    return {**copy, "nonfinite": nonfinite} if nonfinite else copy


def strict_line(record: Mapping[str, Any]) -> str:
    """One line of JSON without its newline."""
    return _line(strict_record(record))


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a log; an unfinished last line, left by a crash, is skipped."""
    if not path.exists():
        return []
    records = (_parse(line) for line in _read(path).split("\n") if line)
    return [record for record in records if record is not None]


class JsonlLog:
    """Owns one log file; every append reaches the operating system before it returns."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one line and returns the record as written."""
        written = strict_record(record)
        self._file.write(_line(written) + "\n")
        self._file.flush()
        return written

    def rewind(self, step: int) -> int:
        """Keeps the lines up to `step`; later ones move to `<name>.superseded.jsonl` beside it.

        A moved line gains `superseded_by_resume_at`: the step of the checkpoint that the run went
        on from. A line cut short by a crash moves too, as text under `unreadable`. The moved lines
        are on disk before the log is replaced, so that a crash in between loses nothing.

        Returns:
            How many lines moved.
        """
        kept, moved = [], []
        for line in _read(self.path).split("\n"):
            if not line:
                continue
            record = _parse(line)
            if record is None:
                moved.append({"unreadable": line, "superseded_by_resume_at": step})
            elif record.get("step", 0) > step:
                moved.append({**record, "superseded_by_resume_at": step})
            else:
                kept.append(line)
        if not moved:
            return 0
        self._file.close()
        superseded = self.path.with_suffix(".superseded.jsonl")
        with superseded.open("a", encoding="utf-8") as file:
            file.writelines(strict_line(record) + "\n" for record in moved)
            _sync(file)
        temporary = self.path.with_suffix(".rewound")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in kept)
            _sync(file)
        temporary.replace(self.path)
        self._file = self._open()
        return len(moved)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _open(self) -> io.TextIOWrapper:
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        file = self.path.open("a", encoding="utf-8")
        if torn:
            file.write("\n")  # the next line must not join the one that a crash cut short
        return file


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, ensure_ascii=False)


def _read(path: pathlib.Path) -> str:
    # A crash may cut a line inside a character. `\xNN` in its place is no JSON: the line stays
    # unreadable, and the others are not lost with it.
    return path.read_text(encoding="utf-8", errors="backslashreplace")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step", 0), int)
    return record if whole else None


def _sync(file: io.TextIOWrapper) -> None:
    file.flush()
    os.fsync(file.fileno())
