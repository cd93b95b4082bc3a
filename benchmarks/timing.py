"""Timing of several steps in turn."""

import time
from collections.abc import Callable, Sequence

import numpy as np


def time_interleaved(
    steps: Sequence[Callable[[], None]],
    *,
    warmup: int,
    iters: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Runs the steps in turn (A B A B ..), so that a drift of the machine meets all alike.

    Args:
        steps: each returns when its device work is done.

    Returns:
        Seconds of each of the `iters` rounds after the warm-up, per step.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    for round_number in range(warmup + iters):
        for step, own in zip(steps, seconds, strict=True):
            start = clock()
            step()
            if round_number >= warmup:
                own.append(clock() - start)
    return seconds


def step_times(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 90th percentile in ms; None each where nothing was timed."""
    if not seconds:
        return {"avg_step_ms": None, "p50_ms": None, "p90_ms": None}
    p50, p90 = (1e3 * float(each) for each in np.percentile(seconds, [50, 90]))
    return {"avg_step_ms": 1e3 * float(np.mean(seconds)), "p50_ms": p50, "p90_ms": p90}
