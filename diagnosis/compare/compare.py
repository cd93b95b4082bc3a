"""Two runs side by side: their histories, where they diverge, and how their inputs differ."""

import math
from typing import Any

import numpy as np

from diagnosis.catalog import catalog
from diagnosis.compare import diffs
from diagnosis.compare.divergence import equal_until, find_divergence
from diagnosis.judgement.history import POINTS, history
from diagnosis.records.run_log import RunLog
from services.wire.strict_json import number_text

POLICY_VIEWS = ("learning", "trust")
"""Metrics of these views describe the policy. Others describe speed, which depends on the machine:
they are listed, but do not count as the divergence of the runs."""
FIRST_GROUPS = ("reward", "accuracy")
"""Groups of the view `learning` that are listed first."""
LENGTH_GROUPS = ("length", "truncated", "tokens", "funnel")
"""Groups of that view on amounts of text, which follow from what the policy learns."""


def compare(
    a: RunLog,
    b: RunLog,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int = POINTS,
) -> dict[str, Any]:
    """The document of /api/compare without `runs`.

    Args:
        first: of the histories, as `history` takes it; divergences are searched in all steps.
        last: the same.
        points: of each history.

    Raises:
        ValueError: as `history`.
    """
    both = [log.steps for log in (a, b) if len(log.steps)]
    if first is None and both:
        first = min(int(steps[0]) for steps in both)
    if last is None and both:
        last = max(int(steps[-1]) for steps in both)
    divergences = _find_divergences(a, b)
    return {
        "histories": [
            history(log, first=first, last=last, points=points, shrink=False) for log in (a, b)
        ],
        "part": _headline(a, b, divergences),
        "parts": divergences,
        "config_diff": diffs.value_diff(a.config, b.config),
        "code_diff": diffs.code_diff(a.folder, b.folder),
        "environment_diff": diffs.value_diff(
            diffs.read_environment(a.folder), diffs.read_environment(b.folder)
        ),
    }


def _find_divergences(a: RunLog, b: RunLog) -> list[dict[str, Any]]:
    """Every charted metric that diverges: its name, the step, and a sentence.

    Reward comes first, then accuracy, training, lengths, and speed; the earliest of each first.
    """
    steps, at_a, at_b = _common(a, b)
    found = []
    for name in catalog.charted(_shared_names(a, b)):
        values = a.column(name)[at_a], b.column(name)[at_b]
        part = _nonfinite_divergence(a, b, name, steps) or _noise_divergence(name, steps, *values)
        if part is not None:
            found.append(part)
    return sorted(found, key=lambda part: (_rank(part["metric"]), *_earliest(part)))


def _headline(a: RunLog, b: RunLog, divergences: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Where the policies of two runs diverge; None if they do not.

    Runs that were equal before diverge at the first different bit, others beyond noise. Of metrics
    that diverge at the same step it names the first.
    """
    of_policy = [part for part in divergences if _is_of_policy(part["metric"])]
    first = min(of_policy, key=_earliest, default=None)
    exact = _exact_divergence(a, b)
    if exact is None:
        return first
    beyond = (
        f"; beyond noise from step {first['step']} on: {first['metric']}"
        if first
        else "; no metric diverges beyond noise"
    )
    return {**exact, "text": exact["text"] + beyond}


def _exact_divergence(a: RunLog, b: RunLog) -> dict[str, Any] | None:
    """The first step at which two runs that were equal before differ in a bit."""
    steps, at_a, at_b = _common(a, b)
    found = []
    for name in filter(_is_of_policy, _shared_names(a, b)):
        of_a, of_b = a.column(name)[at_a], b.column(name)[at_b]
        both = np.isfinite(of_a) & np.isfinite(of_b)
        index = equal_until(of_a[both], of_b[both])
        if index is not None:
            step, before = int(steps[both][index]), int(steps[both][index - 1])
            text = f"every bit is equal up to step {before}; {name} differs from step {step} on"
            found.append({"step": step, "metric": name, "text": text})
    return min(found, key=_earliest, default=None)


def _noise_divergence(
    name: str, steps_N: np.ndarray, a_N: np.ndarray, b_N: np.ndarray
) -> dict[str, Any] | None:
    both = np.isfinite(a_N) & np.isfinite(b_N)
    part = find_divergence(a_N[both], b_N[both])
    if part is None:
        return None
    step = int(steps_N[both][part.index])
    text = (
        f"{name} is about {part.a:.4g} in A and {part.b:.4g} in B from step {step} on; noise would "
        f"explain a difference of {part.noise:.2g}"
    )
    return {"metric": name, "step": step, "text": text}


def _nonfinite_divergence(
    a: RunLog, b: RunLog, name: str, steps_N: np.ndarray
) -> dict[str, Any] | None:
    """The first step at which a metric is finite in one run only."""
    for log, other, here, there in ((a, b, "A", "B"), (b, a, "B", "A")):
        odd = log.steps[log.nonfinite(name)]
        for step in odd[np.isin(odd, steps_N)].tolist():
            value = _at(other, name, step)
            if math.isfinite(value):
                bad = number_text(_at(log, name, step))
                text = f"{name} is {bad} in {here} at step {step}, and {value:.4g} in {there}"
                return {"metric": name, "step": step, "text": text}
    return None


def _at(log: RunLog, name: str, step: int) -> float:
    return float(log.column(name)[np.searchsorted(log.steps, step)])


def _common(a: RunLog, b: RunLog) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that both runs have, and their indices in each."""
    return np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)


def _shared_names(a: RunLog, b: RunLog) -> list[str]:
    of_b = set(b.metric_names)
    return [name for name in a.metric_names if name in of_b]


def _earliest(part: dict[str, Any]) -> tuple[int, int, int]:
    """A sort key: by step, then by importance of the metric."""
    metric = catalog.find(part["metric"])
    row = len(catalog.METRICS) if metric is None else catalog.METRICS.index(metric)
    return part["step"], _rank(part["metric"]), row


def _rank(name: str) -> int:
    """The importance of a metric, 0 first; a user's own metric counts as one of training."""
    metric = catalog.find(name)
    if not _is_of_policy(name):
        return len(FIRST_GROUPS) + 2
    if metric is None or metric.view != "learning":
        return len(FIRST_GROUPS)
    if metric.group in FIRST_GROUPS:
        return FIRST_GROUPS.index(metric.group)
    return len(FIRST_GROUPS) + (metric.group in LENGTH_GROUPS)


def _is_of_policy(name: str) -> bool:
    metric = catalog.find(name)
    return metric is None or metric.view in POLICY_VIEWS
