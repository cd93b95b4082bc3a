"""From the completions of an evaluation to its metrics, its log and its lines on the terminal."""

import dataclasses
from collections.abc import Mapping, Sequence

from driver.accounting.accuracy import Accuracy
from driver.accounting.evaluations import Evaluations, Paired, RightCounts
from driver.config.sections.evaluation import HeldOutSet
from driver.reports.evaluation import (
    eval_metrics,
    greatest_reward,
    is_correct,
    threshold,
)
from driver.reports.step_report import StepReports
from rollout_worker.worker_records import EvalItem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Which policy was evaluated, and what it completed."""

    step: int
    """After which the policy was evaluated."""
    policy_version: int
    recorded_at: int
    """Step whose line of metrics has the result: that one, or a later one."""
    completed: Sequence[Sequence[EvalItem]]
    """The completions of each set, in any order."""


def record_evaluation(
    sets: Sequence[HeldOutSet],
    evaluated: Evaluated,
    evaluations: Evaluations,
    reports: StepReports,
) -> dict[str, float]:
    """Writes down and shows what an evaluation of all sets has found.

    Args:
        evaluations: those before; this one is added.

    Returns:
        its metrics. Of several sets, each has its name in theirs, and those of the first have the
        names without it too.
    """
    metrics: dict[str, float] = {}
    for place, one in enumerate(sets):
        found = _record_set(one, evaluated, evaluated.completed[place], evaluations, reports)
        if one.name:
            metrics |= named_metrics(found, one.name)
        if place == 0:
            metrics |= found
    return metrics


def _record_set(
    one: HeldOutSet,
    evaluated: Evaluated,
    completed: Sequence[EvalItem],
    evaluations: Evaluations,
    reports: StepReports,
) -> dict[str, float]:
    step, scorer = evaluated.step, one.scorer
    items = sorted(completed, key=lambda item: (item.prompt_id, item.sample_index))
    correct_from = threshold(items, scorer=scorer, chosen=one.rules.correct_from)
    right = [
        None if correct_from is None else is_correct(item.rewards, scorer, "strict", correct_from)
        for item in items
    ]
    reports.write_evaluation(evaluated.recorded_at, items, right, evaluated_step=step)
    metrics = eval_metrics(items, scorer=scorer, pass_k=one.rules.pass_k, correct_from=correct_from)
    metrics |= {"eval/step": step, "eval/policy_version": evaluated.policy_version}
    of = f" of {one.name}" if one.name else ""
    if correct_from is None:
        key = f"correct_from of {one.key}" if one.name else "eval.correct_from"
        reports.say(
            f"step {step}: no accuracy and no pass@k{of}: {scorer} gave up to "
            f"{greatest_reward(items, scorer):g}, so 1 need not be right; set {key} to the reward "
            "from which an answer is"
        )
        evaluations.add(one.name, step, None, None)
        return metrics
    accuracy = Accuracy(correct=sum(map(bool, right)), total=len(items), correct_from=correct_from)
    by_prompt: dict[int, int] = {}
    for item, is_right in zip(items, right, strict=True):
        by_prompt[item.prompt_id] = by_prompt.get(item.prompt_id, 0) + bool(is_right)
    counts = RightCounts(
        step=step,
        samples=one.rules.samples_per_prompt,
        correct_from=correct_from,
        by_prompt=by_prompt,
    )
    paired = evaluations.add(one.name, step, accuracy, counts)
    if one.name or paired or evaluated.recorded_at != step:
        reports.say(
            f"step {step}: evaluation{of} under policy version {evaluated.policy_version}: "
            f"accuracy {accuracy}{f'; {paired}' if paired else ''}"
        )
    return metrics | _paired_metrics(paired)


def named_metrics(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The metrics of one of several sets under its name: `eval/NAME/accuracy/strict`."""
    return {f"eval/{name}/{key.removeprefix('eval/')}": x for key, x in metrics.items()}


def _paired_metrics(paired: Paired | None) -> dict[str, float]:
    if paired is None:
        return {}
    return {
        "eval/paired/p_value": paired.p_value,
        "eval/paired/better": float(paired.better),
        "eval/paired/worse": float(paired.worse),
    }
