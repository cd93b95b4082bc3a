"""Metrics of a set of held-out completions: accuracy with its interval, pass@k, mean rewards."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from driver.accounting.accuracy import pass_at_k, wilson_interval
from driver.config.sections.evaluation import EvalConfig
from rollout_worker.worker_records import EvalItem


def is_due(step: int, steps: int, config: EvalConfig) -> bool:
    """Whether the held-out prompts are completed after a step; step 0 is before the first."""
    if step == 0:
        return config.at_start
    if step == steps:
        return config.at_end
    return bool(config.every_steps) and step % config.every_steps == 0


def threshold(items: Sequence[EvalItem], *, scorer: str, chosen: float | None) -> float | None:
    """The reward from which a completion is right; None where that is not known.

    Args:
        items: of one evaluation.
        scorer: the function that decides.
        chosen: correct_from of the set. Without it 1 is right, unless a completion gets more: then
            1 is not the most that the scorer gives.
    """
    if chosen is not None:
        return chosen
    return None if greatest_reward(items, scorer) > 1 else 1.0


def greatest_reward(items: Sequence[EvalItem], scorer: str) -> float:
    """The greatest value that a scorer gave; -inf where it gave none."""
    return max((item.rewards.get(scorer, -math.inf) for item in items), default=-math.inf)


def is_correct(
    rewards: Mapping[str, float], scorer: str, variant: str, correct_from: float
) -> bool:
    """Whether one completion counts as right.

    A scorer that logs `<name>/strict` and `<name>/lenient` is asked for the variant; of any other
    its value counts under both. A completion that could not be scored is wrong.
    """
    return rewards.get(f"{scorer}/{variant}", rewards.get(scorer, -math.inf)) >= correct_from


def eval_metrics(
    items: Sequence[EvalItem], *, scorer: str, pass_k: Sequence[int], correct_from: float | None
) -> dict[str, float]:
    """Metrics of one evaluation of one set.

    Args:
        items: of all prompts. A completion that could not be scored counts as wrong.
        scorer: the function that decides what is right.
        pass_k: values of k for pass@k, over the samples of each prompt.
        correct_from: the reward from which a completion is right; None leaves accuracy and pass@k
            out.

    Raises:
        ValueError: if there is no item.
    """
    if not items:
        raise ValueError("an evaluation needs at least one completion, got none")
    metrics: dict[str, float] = {}
    if correct_from is not None:
        metrics |= _accuracy_metrics(items, scorer, pass_k, correct_from)
    scored = [item for item in items if not item.reward_error]
    if scored:
        totals = [item.total_reward for item in scored]
        metrics["eval/reward/total/mean"] = sum(totals) / len(totals)
    for name in sorted({name for item in scored for name in item.rewards}):
        values = [item.rewards[name] for item in scored if name in item.rewards]
        metrics[f"eval/reward/{name}/mean"] = sum(values) / len(values)
    metrics["eval/reward_errors"] = len(items) - len(scored)
    metrics["eval/completions"] = len(items)
    metrics["eval/completion_len_mean"] = sum(i.completion_tokens for i in items) / len(items)
    metrics["eval/truncated_fraction"] = sum(
        item.finish_reason == "length" for item in items
    ) / len(items)
    return metrics


def _accuracy_metrics(
    items: Sequence[EvalItem], scorer: str, pass_k: Sequence[int], correct_from: float
) -> dict[str, float]:
    metrics = {"eval/correct_from": correct_from}
    prompts = len({item.prompt_id for item in items})
    for variant in ("strict", "lenient"):
        right = [is_correct(item.rewards, scorer, variant, correct_from) for item in items]
        accuracy = sum(right) / len(right)
        # Samples of one prompt are no independent trials: the interval counts prompts.
        low, high = wilson_interval(min(accuracy * prompts, prompts), prompts)
        metrics[f"eval/accuracy/{variant}"] = accuracy
        metrics[f"eval/accuracy/{variant}_low"] = low
        metrics[f"eval/accuracy/{variant}_high"] = high
    by_prompt: dict[int, list[bool]] = defaultdict(list)
    for item in items:
        right = is_correct(item.rewards, scorer, "strict", correct_from)
        by_prompt[item.prompt_id].append(right)
    for k in pass_k:
        rates = [pass_at_k(len(right), sum(right), k) for right in by_prompt.values()]
        metrics[f"eval/pass_at_{k}"] = sum(rates) / len(rates)
    return metrics
