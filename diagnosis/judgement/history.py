"""The history of a run as columns, binned to a number of points that a page can draw.

Dimension key:
    N: known steps in the range
    B: bins
    F: phases of the ledger
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from diagnosis.catalog.catalog import charted
from diagnosis.judgement.breakdown import OTHER
from diagnosis.records.run_log import RunLog
from services.process.phases import LEARNER, PHASES, UNEXPLAINED, WAITS
from services.wire.strict_json import number_text

POINTS = 600
MOST_POINTS = 5000
DIGITS = 5
SECONDS_DECIMALS = 5
"""Of the seconds by phase, which are most of the document; less than 0.00001 s becomes 0."""
MARKED_STEPS = 100
PATH_PHASES = tuple(OTHER if phase == UNEXPLAINED else phase for phase in PHASES)

_IS_BUSY_F = np.array([phase not in (*WAITS, UNEXPLAINED) for phase in PHASES])
_WEIGHTS_WAIT = PHASES.index("weights_wait")
_OTHER = PATH_PHASES.index(OTHER)


@dataclasses.dataclass(frozen=True)
class Bins:
    """How the steps of a range are grouped into points."""

    size: int
    """Steps a bin covers."""
    begin_B: np.ndarray
    """Index of the first step of each bin."""
    steps_B: np.ndarray
    """Number of the first step that each bin covers."""

    @classmethod
    def of(cls, steps_N: np.ndarray, points: int, first: int, last: int) -> "Bins":
        """At most `points` bins of equal width between two steps; empty bins are left out."""
        size = max(1, math.ceil((last - first + 1) / points))
        bin_N = (steps_N - first) // size
        begin_B = np.flatnonzero(np.diff(bin_N, prepend=-1))
        return cls(size, begin_B, first + bin_N[begin_B] * size)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum along the first axis."""
        return np.add.reduceat(values, self.begin_B, axis=0)

    def mean(self, values: np.ndarray, is_there: np.ndarray) -> np.ndarray:
        """Mean over the values that exist; NaN in a bin without any."""
        count = self.sum(is_there.astype(np.float64))
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.sum(np.where(is_there, values, 0.0)) / count


def history(
    log: RunLog,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int = POINTS,
    names: Sequence[str] | None = None,
    shrink: bool = True,
) -> dict[str, Any]:
    """The document of /api/history.

    A point is the mean over those of its steps that measured the metric, or had the process; null
    if none did. Values that are not finite are left out of a mean, and listed under `nonfinite`; a
    point of only such values is one of the texts "NaN", "Infinity", "-Infinity".

    Args:
        first: step number; the first known one by default.
        last: step number, included.
        points: maximum number of points.
        names: metrics, all charted ones by default; a named one is always included.
        shrink: whether to cut the range to the known steps. If not, runs of any length have the
            same bins.

    Raises:
        ValueError: for an impossible range or number of points.
    """
    places, first, last = _range(log, first, last, points, shrink)
    steps_N = log.steps[places]
    if not len(steps_N):
        return _empty(first, last, names or ())
    bins = Bins.of(steps_N, points, first, last)
    metrics, low, high, marks = {}, {}, {}, {}
    for name in charted(log.metric_names) if names is None else names:
        column = _metric(log, name, places, bins)
        if names is None and column.is_empty:
            continue
        metrics[name] = column.mean
        if column.low is not None:
            low[name], high[name] = column.low, column.high
        if column.marked:
            marks[name] = column.marked
    return {
        "first": first,
        "last": last,
        "bin": bins.size,
        "steps": bins.steps_B.tolist(),
        "metrics": metrics,
        "low": low,
        "high": high,
        "nonfinite": marks,
        **_breakdown(log, places, bins),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    mean: list[float | str | None]
    low: list[float | None] | None
    """None, as `high`, if it equals the mean everywhere."""
    high: list[float | None] | None
    marked: list[int]
    is_empty: bool


def _metric(log: RunLog, name: str, places: slice, bins: Bins) -> _Column:
    values_N = log.column(name)[places]
    odd = log.nonfinite(name)
    odd = odd[(odd >= places.start) & (odd < places.stop)] - places.start
    is_finite_N = np.isfinite(values_N)
    mean_B = bins.mean(values_N, is_finite_N)
    mean = _numbers(mean_B)
    if len(odd):
        of_bin = np.searchsorted(bins.begin_B, odd, side="right") - 1
        for place, i in zip(odd.tolist(), of_bin.tolist(), strict=True):
            if mean[i] is None:
                mean[i] = number_text(float(values_N[place]))
    low = high = None
    if bins.size > 1 and is_finite_N.any():
        low_B = np.minimum.reduceat(np.where(is_finite_N, values_N, np.inf), bins.begin_B)
        high_B = np.maximum.reduceat(np.where(is_finite_N, values_N, -np.inf), bins.begin_B)
        if (low_B < high_B).any():
            low, high = _numbers(low_B), _numbers(high_B)
    return _Column(
        mean=mean,
        low=low,
        high=high,
        marked=log.steps[places][odd[:MARKED_STEPS]].tolist(),
        is_empty=not is_finite_N.any() and not len(odd),
    )


def _breakdown(log: RunLog, places: slice, bins: Bins) -> dict[str, Any]:
    """Seconds by phase of each bin, as the mean over the steps with the process."""
    wall_N = log.column("wall_s")[places]
    seconds_NF = {name: log.seconds(name)[places] for name in log.processes}
    is_there_N = {name: ~np.isnan(rows[:, 0]) for name, rows in seconds_NF.items()}
    shown = [name for name, there in is_there_N.items() if there.any()]
    mean_BF = {name: bins.mean(seconds_NF[name], is_there_N[name][:, None]) for name in shown}
    used = [
        i
        for i in range(len(PHASES))
        if any((_rounded_s(mean_BF[n][:, i]) > 0).any() for n in shown)
    ]
    path_N = critical_paths(wall_N, {name: seconds_NF[name] for name in shown})
    path_B = bins.mean(path_N, np.ones(len(wall_N), bool)[:, None])
    on_path = [i for i in range(len(PATH_PHASES)) if (_rounded_s(path_B[:, i]) > 0).any()]
    gaps_B = [mean_BF[name][:, PHASES.index(UNEXPLAINED)] for name in shown]
    worst_B = functools.reduce(np.fmax, gaps_B, np.zeros(len(bins.begin_B)))
    return {
        "processes": shown,
        "phases": [PHASES[i] for i in used],
        "wall_s": _numbers(bins.mean(wall_N, np.isfinite(wall_N))),
        "seconds": {name: _rows(mean_BF[name][:, used]) for name in shown},
        "path": _rows(path_B[:, on_path]),
        "path_phases": [PATH_PHASES[i] for i in on_path],
        "unexplained": _numbers(_rounded_s(worst_B)),
    }


def critical_paths(wall_s_N: np.ndarray, seconds_NF: dict[str, np.ndarray]) -> np.ndarray:
    """`breakdown.critical_path` of many steps, as [N, PATH_PHASES].

    Args:
        wall_s_N: of the steps.
        seconds_NF: of every process; NaN in steps without it.
    """
    busy_NF = {name: np.where(_IS_BUSY_F, np.nan_to_num(s), 0.0) for name, s in seconds_NF.items()}
    nothing_NF = np.zeros((len(wall_s_N), len(PHASES)))
    learner_NF = busy_NF.pop(LEARNER, nothing_NF)
    learner_N = learner_NF.sum(axis=1)
    worker_NF, worker_N = nothing_NF, np.full(len(wall_s_N), -1.0)
    """Of the busiest worker of each step; -1 without a worker."""
    for name, one_NF in busy_NF.items():
        total_N = np.where(np.isnan(seconds_NF[name][:, 0]), -1.0, one_NF.sum(axis=1))
        is_busier_N = total_N > worker_N
        one_NF = one_NF.copy()
        one_NF[:, _WEIGHTS_WAIT] = np.nan_to_num(seconds_NF[name][:, _WEIGHTS_WAIT])
        worker_NF = np.where(is_busier_N[:, None], one_NF, worker_NF)
        worker_N = np.maximum(worker_N, total_N)
    both_N = learner_N + np.maximum(worker_N, 0.0)
    is_overlapped_N = (worker_N >= 0) & (both_N > wall_s_N)
    waited_N = worker_NF[:, _WEIGHTS_WAIT]
    fits_N = ~is_overlapped_N & (both_N + waited_N <= wall_s_N)
    worker_NF = worker_NF.copy()
    worker_NF[:, _WEIGHTS_WAIT] = np.where(fits_N, waited_N, 0.0)
    shorter_N, longer_N = np.sort([learner_N, np.maximum(worker_N, 0.0)], axis=0)
    rest_N = np.maximum(0.0, wall_s_N - longer_N)
    is_cut_N = is_overlapped_N & (shorter_N > 0)
    share_N = np.divide(rest_N, shorter_N, out=np.ones(len(rest_N)), where=is_cut_N)
    """Of the shorter side: the share on the path."""
    path_NF = learner_NF * np.where(learner_N < worker_N, share_N, 1.0)[:, None]
    path_NF += worker_NF * np.where(learner_N < worker_N, 1.0, share_N)[:, None]
    path_NF[:, _OTHER] = np.maximum(0.0, wall_s_N - path_NF.sum(axis=1))
    return path_NF


def _round_digits(values: np.ndarray, digits: int = DIGITS) -> np.ndarray:
    """Rounds to significant digits; NaN and infinity stay."""
    usable = np.isfinite(values) & (values != 0)
    size = np.where(usable, np.abs(values), 1.0)
    power = digits - 1 - np.floor(np.log10(size)).astype(np.int64)
    up, down = 10.0 ** np.clip(power, 0, 22), 10.0 ** np.clip(-power, 0, 22)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.round(values * up / down) / up * down
    exact = usable & (np.abs(power) <= 22)  # further powers of ten are not exact in a float64
    return np.where(exact, rounded, values)


def _numbers(values_B: np.ndarray) -> list[Any]:
    """Rounded numbers for JSON, whole ones without a point; None if not finite."""
    return [_number(value) for value in _round_digits(values_B).tolist()]


def _rows(values_BF: np.ndarray) -> list[list[Any] | None]:
    """The same for each bin; None for a bin without the process."""
    flat = _numbers(_rounded_s(values_BF).ravel())
    bins, width = values_BF.shape
    is_absent_B = np.isnan(values_BF[:, :1]).ravel() if width else np.zeros(bins, bool)
    return [None if is_absent_B[i] else flat[i * width : (i + 1) * width] for i in range(bins)]


def _number(value: float) -> float | int | None:
    if value - value != 0:  # NaN or infinity
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else value


def _rounded_s(seconds: np.ndarray) -> np.ndarray:
    return np.round(seconds, SECONDS_DECIMALS)


def _range(
    log: RunLog, first: int | None, last: int | None, points: int, shrink: bool
) -> tuple[slice, int, int]:
    """Indices of the known steps of a range, and its first and last step number."""
    if not 1 <= points <= MOST_POINTS:
        raise ValueError(f"points={points} must be between 1 and {MOST_POINTS}")
    if first is not None and last is not None and first > last:
        raise ValueError(f"first={first} must not be after last={last}: swap them")
    steps = log.steps
    if not len(steps):
        return slice(0, 0), first or 0, last or 0
    if first is None or (shrink and first < steps[0]):
        first = int(steps[0])
    if last is None or (shrink and last > steps[-1]):
        last = int(steps[-1])
    begin, end = (int(i) for i in np.searchsorted(steps, (first, last + 1)))
    return slice(begin, max(begin, end)), first, last


def _empty(first: int, last: int, names: Sequence[str]) -> dict[str, Any]:
    metrics = {name: [] for name in names}
    lists = ("steps", "processes", "phases", "wall_s", "path", "path_phases", "unexplained")
    mappings = ("low", "high", "nonfinite", "seconds")
    return {
        **{"first": first, "last": last, "bin": 1, "metrics": metrics},
        **{name: [] for name in lists},
        **{name: {} for name in mappings},
    }
