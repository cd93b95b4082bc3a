"""The logs in a run's folder by step, kept up to date while the run writes them.

A step is known once both of its lines exist, in ledger.jsonl and in metrics.jsonl. The files are
the source of truth: reading them again gives the same result.
"""

import dataclasses
import datetime
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from diagnosis.records.columns import LedgerTable, MetricsTable, phase_metric
from diagnosis.records.facts import RunSettings, StepFacts
from diagnosis.records.tail import Tail, TailChange, parse_line, read_line
from services.process.phases import LEARNER, PHASES

MOST_VALUES = 100_000
"""Values of a configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """News that `RunLog.refresh` found."""

    new_steps: Sequence[StepFacts]
    """Steps that became known, rising; after a reload all of them. Each is built when it is
    accessed: a list of 10,000 would take hundreds of megabytes."""
    reloaded: bool
    """The logs were replaced, as by a resume from an older checkpoint: forget all earlier
    steps."""
    status_changed: bool


class RunLog:
    """Reads one run's folder; every file may be missing, or from an older version of Tandem.

    One thread at a time may use it. `refresh` costs a few `stat` calls if nothing has changed.
    """

    def __init__(self, folder: pathlib.Path):
        """Reads nothing yet.

        Raises:
            ValueError: if there is no such folder.
        """
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: give the output folder of a run")
        self.folder = folder
        self.status: dict[str, Any] = {}
        """Of status.json; empty if there is none."""
        self.config: dict[str, Any] = {}
        """Of config.yaml, as values that JSON can represent."""
        self.settings = RunSettings.of({})
        self.skipped: dict[str, int] = {}
        """Count of invalid lines by file: no JSON, no step, or a step out of order."""
        self._small_files: dict[str, tuple[int, int, int]] = {}
        self._forget()

    def refresh(self) -> Changes:
        """Reads what was written since the last call."""
        status_changed = self._read_status()
        self._read_config()
        changes = (self._ledger_tail.poll(), self._metrics_tail.poll())
        reloaded = TailChange.REPLACED in changes
        if reloaded:
            self._forget()
        known = len(self.steps)
        if reloaded or TailChange.GROWN in changes:
            self._read_ledger()
            self._read_metrics()
            self._join()
        return Changes(
            new_steps=_Steps(self, known, len(self.steps)),
            reloaded=reloaded,
            status_changed=status_changed,
        )

    @property
    def steps(self) -> np.ndarray:
        """Numbers of the known steps, int64, rising."""
        return self._steps

    @property
    def processes(self) -> list[str]:
        """Every process of the run so far: the learner, then the workers in order."""
        return sorted(self._ledger.seconds, key=lambda name: (name != LEARNER, natural(name)))

    @property
    def last_step(self) -> int:
        """The last known step; 0 before the first."""
        return int(self._steps[-1]) if len(self._steps) else 0

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics log in order; seconds by phase, as in the ledger, come last."""
        names = [name for name in self._metrics.columns if name != "time"]
        for process in self.processes:
            used = np.flatnonzero(self._ledger.used[process]).tolist()
            names += [f"time/{process}/{PHASES[i]}_s" for i in used]
        return names

    def column(self, name: str) -> np.ndarray:
        """A metric by known step, float64; NaN if it was not measured, or is NaN."""
        if (repeated := phase_metric(name)) is not None:
            process, phase = repeated
            seconds = self.seconds(process)[:, PHASES.index(phase)]
            return np.where(seconds > 0, seconds, math.nan)
        if name == "wall_s":
            return self._ledger.wall_s[self._ledger_rows]
        column = self._metrics.columns.get(name)
        if column is None:
            return np.full(len(self._steps), math.nan)
        return column[self._metrics_rows]

    def seconds(self, process: str) -> np.ndarray:
        """Seconds by [known step, phase of PHASES]; NaN in steps without the process."""
        seconds = self._ledger.seconds.get(process)
        if seconds is None:
            return np.full((len(self._steps), len(PHASES)), math.nan)
        return seconds[self._ledger_rows]

    def nonfinite(self, name: str) -> np.ndarray:
        """Indices into `steps` at which a metric was measured and is not finite, rising."""
        rows = self._metrics.nonfinite.get(name, [])
        places = np.searchsorted(self._metrics_rows, rows)
        places = places[places < len(self._metrics_rows)]
        return places[np.isin(self._metrics_rows[places], rows)]

    def recent(self, n: int) -> list[StepFacts]:
        """The last n known steps, rising."""
        last = len(self._steps)
        return list(_Steps(self, max(0, last - n), last))

    def step(self, n: int) -> StepFacts | None:
        """A step by its number; None if it is not known."""
        place = self._place(n)
        return None if place is None else self._facts(place)

    def groups(self, n: int) -> dict[str, list[str]]:
        """Ids of the groups that ended in a step, by state, read from the ledger on disk."""
        place = self._place(n)
        if place is None:
            return {}
        offset, size = self._ledger.offsets[self._ledger_rows[place]].tolist()
        record = read_line(self.folder / "ledger.jsonl", offset, size) or {}
        groups = record.get("groups")
        return groups if record.get("step") == n and isinstance(groups, dict) else {}

    def _place(self, n: int) -> int | None:
        place = int(np.searchsorted(self._steps, n))
        known = place < len(self._steps) and self._steps[place] == n
        return place if known else None

    def _facts(self, place: int) -> StepFacts:
        ledger, row = self._ledger, int(self._ledger_rows[place])
        metrics = self._metrics_of(int(self._metrics_rows[place]))
        processes: dict[str, dict[str, float]] = {}
        for name, seconds in ledger.seconds.items():
            of_row = seconds[row].tolist()
            if not math.isnan(of_row[0]):
                processes[name] = dict(zip(PHASES, of_row, strict=True))
                metrics |= {
                    f"time/{name}/{phase}_s": s for phase, s in processes[name].items() if s > 0
                }
        return StepFacts(
            step=int(self._steps[place]),
            time=metrics.pop("time", math.nan),
            wall_s=float(ledger.wall_s[row]),
            processes=processes,
            metrics=metrics,
            overlap_s=ledger.overlap_s.get(row, {}),
            absent_s=ledger.absent_s.get(row, {}),
            groups={state: int(n[row]) for state, n in ledger.groups.items() if n[row]},
            outstanding=int(ledger.outstanding[row]),
            warnings=ledger.warnings.get(row, ()),
        )

    def _metrics_of(self, row: int) -> dict[str, float]:
        values = {name: float(column[row]) for name, column in self._metrics.columns.items()}
        marked = self._metrics.nonfinite
        return {
            name: value
            for name, value in values.items()
            if not math.isnan(value) or row in marked.get(name, ())
        }

    def _forget(self) -> None:
        self._ledger_tail = Tail(self.folder / "ledger.jsonl")
        self._metrics_tail = Tail(self.folder / "metrics.jsonl")
        self._ledger = LedgerTable()
        self._metrics = MetricsTable()
        self._steps = self._ledger_rows = self._metrics_rows = np.empty(0, np.int64)
        self.skipped = {"ledger.jsonl": 0, "metrics.jsonl": 0}

    def _read_ledger(self) -> None:
        for batch in self._ledger_tail.batches():
            records, places = [], []
            for offset, line in batch:
                if (record := parse_line(line)) is not None:
                    records.append(record)
                    places.append((offset, len(line)))
            unparsed = len(batch) - len(records)
            self.skipped["ledger.jsonl"] += unparsed + self._ledger.append_records(records, places)

    def _read_metrics(self) -> None:
        for batch in self._metrics_tail.batches():
            parsed = (parse_line(line) for _, line in batch)
            records = [record for record in parsed if record is not None]
            unparsed = len(batch) - len(records)
            self.skipped["metrics.jsonl"] += unparsed + self._metrics.append_records(records)

    def _join(self) -> None:
        """Finds the steps that both tables have; earlier ones keep their index, as both rise."""
        ledger, metrics = self._ledger, self._metrics
        self._steps, self._ledger_rows, self._metrics_rows = np.intersect1d(
            ledger.steps[: ledger.rows],
            metrics.steps[: metrics.rows],
            assume_unique=True,
            return_indices=True,
        )

    def _read_status(self) -> bool:
        text = self._changed_text("status.json")
        try:
            status = json.loads(text) if text else None
        except (ValueError, RecursionError):
            return False
        if not isinstance(status, dict) or status == self.status:
            return False
        self.status = status
        return True

    def _read_config(self) -> None:
        text = self._changed_text("config.yaml")
        if not text:
            return
        try:
            config = _plain(YAML(typ="safe", pure=True).load(text))
        except (YAMLError, RecursionError, ValueError):  # ValueError: an impossible date
            return
        if isinstance(config, dict):
            self.config = config
            self.settings = RunSettings.of(self.config)

    def _changed_text(self, name: str) -> str:
        """The text of a small file; empty if it is missing or has not changed."""
        path = self.folder / name
        try:
            stat = os.stat(path)
            version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._small_files.get(name) == version:
                return ""
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        self._small_files[name] = version
        return text


class _Steps(Sequence[StepFacts]):
    """Known steps of a log by index, each built when it is accessed."""

    def __init__(self, log: RunLog, first: int, end: int):
        self._log = log
        self._places = range(first, end)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> StepFacts: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepFacts]: ...
    def __getitem__(self, index: int | slice) -> StepFacts | list[StepFacts]:
        if isinstance(index, slice):
            return [self._log._facts(place) for place in self._places[index]]
        return self._log._facts(self._places[index])

    def __iter__(self) -> Iterator[StepFacts]:
        return (self._log._facts(place) for place in self._places)


def _plain(value: Any, counted: Iterator[int] | None = None) -> Any:
    """A copy of a YAML value that JSON can represent: dates and the like become text.

    Raises:
        ValueError: for more than MOST_VALUES, which nested aliases can make from a few lines.
    """
    counted = itertools.count() if counted is None else counted
    if next(counted) > MOST_VALUES:
        raise ValueError(f"the configuration has more than {MOST_VALUES} values")
    if isinstance(value, Mapping):
        return {str(key): _plain(one, counted) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one, counted) for one in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key that places rollout-10 after rollout-9."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d{1,18})", name)
    )
