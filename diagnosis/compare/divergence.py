"""The step from which on two runs differ by more than their noise.

The rule for one metric: smooth the paired differences by a running median over `window` steps, and
compare the result with the noise of such medians. The noise is estimated from each run alone: the
median distance between running medians of neighbouring windows after removing their trend, so that
a few spikes do not count as noise. If the differences within a window are spread further than that,
their spread is the noise: noise often shrinks or grows while a policy learns. The runs diverge if
the smoothed difference stays beyond Z times the noise, on one side, for a whole window of windows;
the step reported is where it left the noise before that, which is within half a window of a jump.

Runs with few common steps diverge if every value of one is above all values of the other.

Two runs that only differ in their random numbers diverge by this rule in fewer than 1 of 1000
metrics of independent noise. Noise that drifts for longer than two windows looks like a
difference.

Dimension key:
    N: steps that measured the metric in both runs
    W: windows
"""

import dataclasses

import numpy as np

LEAST_STEPS = 30
"""Fewer common steps cannot show noise that drifts."""
SHORT_STEPS = 10
"""Enough if every value of one run is above every value of the other: independent noise does that
once in 92 000 times."""
MOST_WINDOW = 11
Z = 4.5
SHORT_Z = 35.0
"""Divided by the number of steps and added to Z: few steps give a worse estimate of the noise."""
NORMAL_MEDIAN, NORMAL_MEAN = 1.4826, 1.2533
"""Standard deviation of normal numbers over the median and the mean of their distance from 0."""
EQUAL_STEPS = 3
"""This many equal values of a metric that never repeats are no coincidence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where one metric of two runs diverges."""

    index: int
    """Of the first step that differs, among those given."""
    a: float
    """Median of the values from there on, over at most five windows."""
    b: float
    noise: float
    """Of the smoothed difference over the whole run, one standard deviation."""


def find_divergence(a_N: np.ndarray, b_N: np.ndarray) -> Divergence | None:
    """Where two series of finite values diverge beyond noise; None if they do not."""
    n = len(a_N)
    if n < LEAST_STEPS:
        return _separate_throughout(a_N, b_N)
    window = min(MOST_WINDOW, max(5, n // 16 * 2 + 1))
    smooth_W = running_median(a_N - b_N, window)
    noise = float(np.hypot(window_noise(a_N, window), window_noise(b_N, window)))
    noise_W = np.maximum(noise, spread_noise(a_N - b_N, window))
    z = Z + SHORT_Z / n
    side_W = np.where(np.abs(smooth_W) > z * noise_W, np.sign(smooth_W), 0.0)
    begin = _first_streak(side_W, window)
    if begin is None:
        return None
    quiet = np.flatnonzero(np.sign(smooth_W[begin]) * smooth_W[:begin] <= noise)
    index = int(quiet[-1]) + window // 2 + 1 if len(quiet) else 0
    later = slice(index, index + 5 * window)
    a, b = float(np.median(a_N[later])), float(np.median(b_N[later]))
    return Divergence(index=index, a=a, b=b, noise=noise)


def _separate_throughout(a_N: np.ndarray, b_N: np.ndarray) -> Divergence | None:
    """The divergence of short runs whose ranges of values do not overlap."""
    n = len(a_N)
    if n < SHORT_STEPS or (a_N.max() >= b_N.min() and b_N.max() >= a_N.min()):
        return None
    noise = NORMAL_MEAN * float(np.hypot(a_N.std(), b_N.std())) / n**0.5
    return Divergence(index=0, a=float(np.median(a_N)), b=float(np.median(b_N)), noise=noise)


def running_median(values_N: np.ndarray, window: int) -> np.ndarray:
    """Median of each `window` neighbours, [N - window + 1]."""
    return np.median(np.lib.stride_tricks.sliding_window_view(values_N, window), axis=-1)


def window_noise(values_N: np.ndarray, window: int) -> float:
    """Standard deviation of running medians about the trend that they follow.

    Where most medians stay the same, so that no distance is typical, the mean distance counts.
    """
    smooth_W = running_median(values_N, window)
    distance_W = smooth_W[window:] - smooth_W[:-window]
    off_trend_W = np.abs(distance_W - np.median(distance_W))
    spread = NORMAL_MEDIAN * float(np.median(off_trend_W))
    return (spread or NORMAL_MEAN * float(np.mean(off_trend_W))) / 2**0.5


def spread_noise(values_N: np.ndarray, window: int) -> np.ndarray:
    """Standard deviation of each running median, [N - window + 1], by the spread in its window."""
    spread_W = np.lib.stride_tricks.sliding_window_view(values_N, window).std(axis=-1, ddof=1)
    return NORMAL_MEAN * spread_W / window**0.5


def equal_until(a_N: np.ndarray, b_N: np.ndarray) -> int | None:
    """Index of the first difference of two runs that were equal before it.

    None if the metric cannot tell: it repeats its values, or differs too soon, or never.
    """
    differs = np.flatnonzero(a_N != b_N)
    if not len(differs) or differs[0] < EQUAL_STEPS:
        return None
    varies = all(len(np.unique(values)) >= 0.9 * len(values) for values in (a_N, b_N))
    return int(differs[0]) if varies else None


def _first_streak(side_W: np.ndarray, length: int) -> int | None:
    """Where the first `length` neighbours lie on one side that is not 0."""
    if len(side_W) < length:
        return None
    total_W = np.lib.stride_tricks.sliding_window_view(side_W, length).sum(axis=-1)
    found = np.flatnonzero(np.abs(total_W) == length)
    return int(found[0]) if len(found) else None
