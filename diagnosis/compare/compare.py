"""Two runs side by side: their courses, where they part, and what was different from the start."""

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
"""Metrics of these views tell what the policy does. Others tell how fast it went, which differs
between machines: they are listed, but are not where two runs part."""
FIRST_GROUPS = ("reward", "accuracy")
"""Of the view `learning`: what a person asks for first."""
LENGTH_GROUPS = ("length", "truncated", "tokens", "funnel")
"""Of that view: amounts of text, which follow from what the policy learns."""


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
    parts = find_parts(a, b)
    return {
        "histories": [
            history(log, first=first, last=last, points=points, shrink=False) for log in (a, b)
        ],
        "part": headline(a, b, parts),
        "parts": parts,
        "config_diff": diffs.value_diff(a.config, b.config),
        "code_diff": diffs.code_diff(a.folder, b.folder),
        "environment_diff": diffs.value_diff(
            diffs.read_environment(a.folder), diffs.read_environment(b.folder)
        ),
    }


def find_parts(a: RunLog, b: RunLog) -> list[dict[str, Any]]:
    """Every charted metric that parts: its name, the step, and a sentence.

    Reward comes first, then accuracy, training, lengths, and speed; the earliest of each first.
    """
    steps, at_a, at_b = _common(a, b)
    found = []
    for name in catalog.charted(_shared_names(a, b)):
        values = a.column(name)[at_a], b.column(name)[at_b]
        part = _odd_part(a, b, name, steps) or _noise_part(name, steps, *values)
        if part is not None:
            found.append(part)
    return sorted(found, key=lambda part: (_rank(part["metric"]), *_earliest(part)))


def headline(a: RunLog, b: RunLog, parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Where the policies of two runs part: by the bit where they were equal before, else beyond
    noise; None where they do not. Of metrics that part at one step it names the first of `parts`.
    """
    of_policy = [part for part in parts if _is_of_policy(part["metric"])]
    first = min(of_policy, key=_earliest, default=None)
    exact = _exact_part(a, b)
    if exact is None:
        return first
    beyond = (
        f"; beyond noise from step {first['step']} on: {first['metric']}"
        if first
        else "; no metric leaves its noise"
    )
    return {**exact, "text": exact["text"] + beyond}


def _exact_part(a: RunLog, b: RunLog) -> dict[str, Any] | None:
    """The first step at which runs that did the very same before differ in a bit."""
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


def _noise_part(
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


def _odd_part(a: RunLog, b: RunLog, name: str, steps_N: np.ndarray) -> dict[str, Any] | None:
    """The first step at which a metric is not finite in one run, and finite in the other."""
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
    """Steps that both runs know, and where they stand in each."""
    return np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)


def _shared_names(a: RunLog, b: RunLog) -> list[str]:
    of_b = set(b.metric_names)
    return [name for name in a.metric_names if name in of_b]


def _earliest(part: dict[str, Any]) -> tuple[int, int, int]:
    """A key: by step, and at one step by what a person asks for first."""
    metric = catalog.find(part["metric"])
    row = len(catalog.METRICS) if metric is None else catalog.METRICS.index(metric)
    return part["step"], _rank(part["metric"]), row


def _rank(name: str) -> int:
    """The place of a metric in what a person asks for first; somebody's own is about training."""
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
