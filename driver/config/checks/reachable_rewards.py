"""Whether a completion can be right, or wrong, by the bounds that a run sets for its rewards."""

import math

from driver.config.run_config import RunConfig
from rollout_worker.config.reward_config import RewardConfig
from rollout_worker.rewards.scorers import BUILT_INS


def correctness_notes(run: RunConfig) -> list[str]:
    """One line for each bound from which on every completion, or none, is correct.

    Built-in scorers give between 0 and 1; of others nothing is known.
    """
    notes = []
    algorithm = run.algorithm
    if algorithm.advantage == "pass_at_k" or algorithm.length_coef > 0:
        least, most = _totals(run.reward)
        if said := _always_or_never(algorithm.correct_from, least, most):
            notes.append(f"algorithm.correct_from={algorithm.correct_from:g} {said}")
    for one in run.held_out_sets:
        bound = one.rules.correct_from
        if bound is None or one.scorer not in BUILT_INS:
            continue
        if said := _always_or_never(bound, 0.0, 1.0):
            notes.append(f"{one.key}: correct_from={bound:g} {said}, by {one.scorer}")
    return notes


def _always_or_never(bound: float, least: float, most: float) -> str:
    if bound > most:
        return f"is above {most:g}, the most that a completion can get: none is ever correct"
    if bound <= least:
        return f"is not above {least:g}, the least that a completion can get: each is correct"
    return ""


def _totals(reward: RewardConfig) -> tuple[float, float]:
    """The least and the most that a completion can get in total."""
    if any(one.name not in BUILT_INS for one in reward.functions if one.weight):
        return -math.inf, math.inf
    weights = [one.weight for one in reward.functions if one.weight]
    terms = weights if reward.combine == "sum" else [math.prod(weights)]
    return sum(min(one, 0.0) for one in terms), sum(max(one, 0.0) for one in terms)
