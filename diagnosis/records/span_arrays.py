"""Spans of one process as arrays: read from a timeline, and thinned for the page.

Dimension key:
    N: spans
    R: runs of neighbouring spans that are merged
    F: phases of the ledger
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from diagnosis.records.columns import number
from services.process.phases import PHASES

DECIMALS = 4
"""Of seconds."""


def spans_N3(segments: Iterable[tuple[float, Mapping[str, Any]]]) -> np.ndarray:
    """Index of the phase, start and seconds of each valid span, float64.

    Args:
        segments: offset in seconds and record of a process, one for each step.
    """
    rows: list[Any] = []
    later_s, counts = [], []
    for start_s, record in segments:
        found = record.get("spans")
        if isinstance(found, list):
            rows += found
            later_s.append(start_s)
            counts.append(len(found))
    if not rows:
        return np.empty((0, 3))
    try:
        spans = np.array(rows, np.float64).reshape(len(rows), 3)
    except (TypeError, ValueError, OverflowError):  # a row that is not a span
        spans = np.array([_numbers(row) for row in rows])
    phase_N, start_N, seconds_N = spans[:, 0], spans[:, 1], spans[:, 2]
    is_span_N = np.isin(phase_N, range(len(PHASES))) & np.isfinite(start_N + seconds_N)
    start_N += np.repeat(later_s, counts)
    return spans[is_span_N & (seconds_N >= 0)]


def _numbers(row: Any) -> list[float]:
    """The numbers of a row; NaN if it is not a span."""
    is_span = isinstance(row, list) and len(row) == 3
    return [number(value) for value in row] if is_span else [math.nan] * 3


def marks_of(record: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Time and text of each valid mark of a process."""
    rows = record.get("marks")
    if not isinstance(rows, list):
        return []
    pairs = (one for one in rows if isinstance(one, list) and len(one) == 2)
    return [(number(at), str(text)) for at, text in pairs if math.isfinite(number(at))]


def without_overlaps(spans: np.ndarray) -> np.ndarray:
    """The spans [N, 3] with each one starting after the ends of those before."""
    if not len(spans):
        return spans
    end_N = spans[:, 1] + spans[:, 2]
    busy_until_N = np.concatenate(([-np.inf], np.maximum.accumulate(end_N)[:-1]))
    start_N = np.maximum(spans[:, 1], busy_until_N)
    kept = np.stack((spans[:, 0], start_N, end_N - start_N), axis=1)
    return kept[end_N > start_N]


def thinned(spans: np.ndarray, most: int) -> np.ndarray:
    """At most `most` spans [N, 3]: runs of short neighbours are merged.

    A run gets the phase that is owed the most seconds, counting earlier runs, so that each phase
    keeps about its total. Long spans stay as they are.
    """
    if len(spans) <= most:
        return spans
    first_s, last_s = spans[0, 1], spans[-1, 1] + spans[-1, 2]
    grain_s = max((last_s - first_s) / most, 1e-9)
    while len(begin_R := _run_begins(spans, first_s, grain_s)) > most:
        grain_s *= 2
    run_N = np.repeat(np.arange(len(begin_R)), np.diff(begin_R, append=len(spans)))
    cell_N = run_N * len(PHASES) + spans[:, 0].astype(np.int64)
    seconds_RF = np.bincount(cell_N, spans[:, 2], len(begin_R) * len(PHASES))
    seconds_RF = seconds_RF.reshape(-1, len(PHASES))
    end_R = np.append(begin_R[1:], len(spans)) - 1
    length_R = spans[end_R, 1] + spans[end_R, 2] - spans[begin_R, 1]
    phase_R = _owed_phases(seconds_RF, length_R)
    return np.stack((phase_R, spans[begin_R, 1], length_R), axis=1)


def _run_begins(spans: np.ndarray, first_s: float, grain_s: float) -> np.ndarray:
    """Index of the first span of each run: a long span alone, short spans of one grain together."""
    is_long_N = spans[:, 2] >= grain_s
    grain_N = ((spans[:, 1] - first_s) // grain_s).astype(np.int64)
    is_begin_N = is_long_N | (np.diff(grain_N, prepend=-1) != 0)
    is_begin_N[1:] |= is_long_N[:-1]
    return np.flatnonzero(is_begin_N)


def _owed_phases(seconds_RF: np.ndarray, length_R: np.ndarray) -> np.ndarray:
    owed_F = np.zeros(seconds_RF.shape[1])
    phase_R = np.empty(len(seconds_RF))
    for run, seconds_F in enumerate(seconds_RF):
        owed_F += seconds_F
        phase = int(np.where(seconds_F > 0, owed_F, -np.inf).argmax())
        owed_F[phase] -= length_R[run]
        phase_R[run] = phase
    return phase_R


def json_rows(spans: np.ndarray) -> list[list[float]]:
    """The spans [N, 3] for the page, with rounded times."""
    phases = spans[:, 0].astype(np.int64).tolist()
    times = np.round(spans[:, 1:], DECIMALS).tolist()
    return [[phase, *two] for phase, two in zip(phases, times, strict=True)]
