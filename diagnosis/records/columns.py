"""Columns of numbers by step: a run's metrics and ledger in memory.

A table takes 8 bytes a number; the records that it is built from take about 100. A value that a
step did not measure is NaN in its column; a value that was measured as NaN is NaN too, and marked.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from services.process.phases import PHASES, UNEXPLAINED
from services.wire.strict_json import NUMBERS

GROW_ROWS = 2048
MOST_S = 1e12
"""Longer than any step; a larger number is an error of its writer."""
_PHASE_METRIC = re.compile(f"time/(.+)/({'|'.join(PHASES)})_s", re.DOTALL)


class MetricsTable:
    """The numbers of metrics.jsonl without seconds by phase, which the ledger has."""

    def __init__(self) -> None:
        self.steps = np.empty(0, np.int64)
        """Step of each row, rising."""
        self.columns: dict[str, np.ndarray] = {}
        self.nonfinite: dict[str, list[int]] = {}
        """Rows in which a metric was measured but is not finite, rising."""
        self._rows = 0

    @property
    def rows(self) -> int:
        """Number of rows in use."""
        return self._rows

    def append_records(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Appends records; returns how many were invalid: no step, or one that does not rise."""
        usable = list(_rising(records, _last(self.steps, self._rows)))
        first, self._rows = self._rows, self._rows + len(usable)
        self.steps = _grown(self.steps, self._rows, 0)
        self.steps[first : self._rows] = [record["step"] for record in usable]
        for name, column in self.columns.items():
            self.columns[name] = _grown(column, self._rows, math.nan)
        begin = 0
        while begin < len(usable):
            keys = usable[begin].keys()
            end = begin + 1
            while end < len(usable) and usable[end].keys() == keys:
                end += 1
            self._add_alike(first + begin, usable[begin:end])
            begin = end
        return len(records) - len(usable)

    def _add_alike(self, first: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Stores records of the same keys as rows from `first` on."""
        names = [name for name in records[0] if name != "step" and phase_metric(name) is None]
        rows = [[record[name] for name in names] for record in records]
        absent = np.zeros((len(rows), len(names)), bool)
        try:
            values = np.array(rows, np.float64)
            sound = values.ndim == 2 and bool(np.isfinite(values).all())
        except (TypeError, ValueError, OverflowError):  # texts, nested values, huge integers
            values, sound = absent, False
        if not sound:
            absent = np.array([[_is_no_number(value) for value in row] for row in rows])
            values = np.array([[number(value) for value in row] for row in rows])
        marked = ~np.isfinite(values) & ~absent
        for i, name in enumerate(names):
            if absent[:, i].all():
                continue
            if name not in self.columns:
                self.columns[name] = np.full(len(self.steps), math.nan)
            self.columns[name][first : first + len(records)] = values[:, i]
            if marked[:, i].any():
                bad = (first + np.flatnonzero(marked[:, i])).tolist()
                self.nonfinite.setdefault(name, []).extend(bad)


class LedgerTable:
    """The numbers of ledger.jsonl, and the offset of each step in the file."""

    def __init__(self) -> None:
        self.steps = np.empty(0, np.int64)
        self.wall_s = np.empty(0, np.float64)
        self.outstanding = np.empty(0, np.int64)
        self.offsets = np.empty((0, 2), np.int64)
        """Offset of the line of each row in the file, and its length in bytes."""
        self.seconds: dict[str, np.ndarray] = {}
        """Seconds of every process as [row, phase of PHASES]; NaN in steps without the process."""
        self.used: dict[str, np.ndarray] = {}
        """Which phases of PHASES each process has spent time in, bool."""
        self.groups: dict[str, np.ndarray] = {}
        """Number of groups that ended in each row, by state."""
        self.overlap_s: dict[int, dict[str, float]] = {}
        self.absent_s: dict[int, dict[str, float]] = {}
        self.warnings: dict[int, tuple[str, ...]] = {}
        self._rows = 0

    @property
    def rows(self) -> int:
        """Number of rows in use."""
        return self._rows

    def append_records(
        self, records: Sequence[Mapping[str, Any]], offsets: Sequence[tuple[int, int]]
    ) -> int:
        """Appends records; returns how many were invalid.

        Args:
            offsets: offset and length of the line of each record.
        """
        places = {id(record): place for record, place in zip(records, offsets, strict=True)}
        sound = [record for record in records if _is_ledger_record(record)]
        usable = list(_rising(sound, _last(self.steps, self._rows)))
        first, self._rows = self._rows, self._rows + len(usable)
        self._grow()
        rows = slice(first, self._rows)
        self.steps[rows] = [record["step"] for record in usable]
        self.wall_s[rows] = [record["wall_s"] for record in usable]
        self.outstanding[rows] = [_count(record.get("outstanding")) for record in usable]
        self.offsets[rows] = np.array([places[id(r)] for r in usable], np.int64).reshape(-1, 2)
        for row, record in enumerate(usable, first):
            self._add_rest(row, record)
        return len(records) - len(usable)

    def _add_rest(self, row: int, record: Mapping[str, Any]) -> None:
        for process, phases in record["processes"].items():
            if process not in self.seconds:
                self.seconds[process] = np.full((len(self.steps), len(PHASES)), math.nan)
                self.used[process] = np.zeros(len(PHASES), bool)
            seconds = [phases.get(phase, 0.0) for phase in PHASES]
            if UNEXPLAINED not in phases:
                seconds[PHASES.index(UNEXPLAINED)] = max(0.0, record["wall_s"] - sum(seconds))
            self.seconds[process][row] = seconds
            self.used[process] |= self.seconds[process][row] > 0
        for state, ids in _mapping(record.get("groups")).items():
            if state not in self.groups:
                self.groups[state] = np.zeros(len(self.steps), np.int32)
            self.groups[state][row] = len(ids) if isinstance(ids, list) else 0
        for key, kept in (("overlap_s", self.overlap_s), ("absent_s", self.absent_s)):
            if by_process := _mapping(record.get(key)):
                kept[row] = {name: number(value) for name, value in by_process.items()}
        if (warnings := record.get("warnings")) and isinstance(warnings, list):
            self.warnings[row] = tuple(str(text) for text in warnings)

    def _grow(self) -> None:
        self.steps = _grown(self.steps, self._rows, 0)
        self.wall_s = _grown(self.wall_s, self._rows, math.nan)
        self.outstanding = _grown(self.outstanding, self._rows, 0)
        self.offsets = _grown(self.offsets, self._rows, 0)
        for process, seconds in self.seconds.items():
            self.seconds[process] = _grown(seconds, self._rows, math.nan)
        for state, counts in self.groups.items():
            self.groups[state] = _grown(counts, self._rows, 0)


@functools.lru_cache(maxsize=4096)
def phase_metric(name: str) -> tuple[str, str] | None:
    """Process and phase of a metric that repeats seconds of the ledger; None for any other."""
    found = _PHASE_METRIC.fullmatch(name)
    return (found[1], found[2]) if found else None


def number(value: Any) -> float:
    """A value of a log as a float; NaN if it is not a number."""
    if isinstance(value, str):
        return NUMBERS.get(value, math.nan)
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_no_number(value: Any) -> bool:
    return value not in NUMBERS if isinstance(value, str) else not isinstance(value, int | float)


def _is_ledger_record(record: Mapping[str, Any]) -> bool:
    """Whether a record has everything that is needed to show a step."""
    processes = record.get("processes")
    return (
        _are_seconds(record.get("wall_s"))
        and record["wall_s"] > 0
        and isinstance(processes, dict)
        and all(
            isinstance(row, dict) and all(_are_seconds(s) for s in row.values())
            for row in processes.values()
        )
    )


def _are_seconds(value: Any) -> bool:
    """Whether a value is a plausible, finite number of seconds."""
    return isinstance(value, int | float) and abs(value) <= MOST_S


def _rising(records: Sequence[Mapping[str, Any]], last: int) -> Iterator[Mapping[str, Any]]:
    """The records whose step is a whole number above all earlier ones."""
    for record in records:
        step = record.get("step")
        if type(step) is int and last < step < 2**62:
            last = step
            yield record


def _grown(array: np.ndarray, rows: int, fill: float) -> np.ndarray:
    """The array, or a longer copy of it with room for `rows` rows."""
    if rows <= len(array):
        return array
    room = max(rows, len(array) + max(GROW_ROWS, len(array) // 4))
    longer = np.full((room, *array.shape[1:]), fill, array.dtype)
    longer[: len(array)] = array
    return longer


def _last(steps: np.ndarray, rows: int) -> int:
    return int(steps[rows - 1]) if rows else -1


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
