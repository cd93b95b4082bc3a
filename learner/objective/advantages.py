"""Advantages: how good a completion was beside the others of its prompt, or of its batch.

Runs on the host in float64 on a few numbers per prompt, over the whole batch at once; nothing here
is traced, and neither devices nor micro-batches nor packing can change what comes out.

Dimension key:
    G: completions of one prompt (the group)
    R: reward functions
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class AdvantageRule(NamedTuple):
    """How rewards become advantages; see AlgorithmConfig."""

    kind: str
    eps: float = 1e-6
    """In reward units; keeps divisions by a deviation finite."""
    pass_k: int = 1
    pass_from: float = 1.0
    """For `pass_at_k`: the total reward from which a completion is correct."""


Comparison = Callable[[np.ndarray, AdvantageRule], np.ndarray]
"""From the rewards of a group, two at least and not all equal, to their advantages; float64."""


class GroupRewards(NamedTuple):
    """The rewards of one group; NaN or infinite where a completion has none."""

    total_G: np.ndarray
    each_RG: np.ndarray | None = None
    """By reward function; only `reward_norm` reads them, with their weights."""
    weight_R: np.ndarray | None = None


def batch_advantages(groups: Sequence[GroupRewards], rule: AdvantageRule) -> list[np.ndarray]:
    """Compares the reward of each completion with those of its group, or of the whole batch.

    A completion without a reward is left out of every mean and deviation and gets 0, as does a
    group without variance (see has_variance), exactly; but under `batch_norm`, where the batch is
    what is compared with, the latter has a value. Deviations are those of the population (ddof 0).

    * `group_norm`: (r - mean) / (std + eps) of the group. DeepSeekMath, arXiv:2402.03300, 4.1.2.
    * `group_centre`: r - mean of the group. Dr. GRPO, arXiv:2503.20783.
    * `leave_one_out`: r - mean of the other completions of the group. RLOO, arXiv:2402.14740,
      equation 8.
    * `batch_norm`: (r - mean) / (std + eps) of all completions of the batch. REINFORCE++,
      arXiv:2501.03262, without its KL term in the reward.
    * `group_centre_batch_norm`: r - mean of the group, divided by (std + eps) of all these
      differences in the batch. REINFORCE++-baseline, of the same article.
    * `reward_norm`: `group_norm` of each reward function alone, added up with the weights, and
      `batch_norm` of the sums. GDPO, arXiv:2601.05242, equations 4 to 6.
    * `pass_at_k`: the advantage of a completion in the pass@k of its group, from the number of
      correct ones. Pass@k training, arXiv:2508.10751, equations 14 and 15.
    * `gae`: 0, until a critic says what it expected of each token (gae.py).

    Returns:
        float32 [G] for each group, in order.

    Raises:
        ValueError: if the kind is unknown.
    """
    if rule.kind not in KINDS:
        raise ValueError(f"advantage must be one of {', '.join(KINDS)}, got {rule.kind!r}")
    raw = [_compared(group, rule) for group in groups]
    if rule.kind in _OVER_BATCH:
        raw = _over_batch(raw, rule.eps, centre=rule.kind != "group_centre_batch_norm")
    return [np.where(np.isnan(raw_G), 0.0, raw_G).astype(np.float32) for raw_G in raw]


def has_variance(reward_G: np.ndarray) -> bool:
    """Whether a group says anything: at least two rewards, and not all the same.

    Equality is exact. A deviation computed in floating point is no test, since equal rewards
    such as 0.35 can leave a residue above zero.
    """
    reward_G = np.asarray(reward_G, np.float64)
    reward = reward_G[np.isfinite(reward_G)]
    return reward.size > 1 and reward.min() != reward.max()


def _compared(group: GroupRewards, rule: AdvantageRule) -> np.ndarray:
    """What the group alone says of its completions; float64 [G], NaN where one has no reward."""
    if rule.kind == "gae":
        return np.zeros(np.shape(group.total_G))
    if rule.kind == "batch_norm":
        return np.where(np.isfinite(group.total_G), group.total_G, np.nan)
    if rule.kind != "reward_norm":
        return _in_group(group.total_G, _OF_GROUP[rule.kind], rule)
    if group.each_RG is None or group.weight_R is None:
        raise ValueError("advantage=reward_norm needs the rewards of each reward function")
    normed_RG = [_in_group(reward_G, _group_norm, rule) for reward_G in group.each_RG]
    sum_G = np.asarray(group.weight_R) @ np.nan_to_num(normed_RG)
    return np.where(np.isfinite(group.total_G), sum_G, np.nan)


def _in_group(reward_G: np.ndarray, compare: Comparison, rule: AdvantageRule) -> np.ndarray:
    reward_G = np.asarray(reward_G, np.float64)
    found_G = np.full(reward_G.shape, np.nan)
    rewarded_G = np.isfinite(reward_G)
    found_G[rewarded_G] = compare(reward_G[rewarded_G], rule) if has_variance(reward_G) else 0.0
    return found_G


def _group_norm(reward: np.ndarray, rule: AdvantageRule) -> np.ndarray:
    centred = reward - reward.mean()
    return centred / (centred.std() + rule.eps)


def _group_centre(reward: np.ndarray, rule: AdvantageRule) -> np.ndarray:
    return reward - reward.mean()


def _leave_one_out(reward: np.ndarray, rule: AdvantageRule) -> np.ndarray:
    return reward - (reward.sum() - reward) / (reward.size - 1)


def _pass_at_k(reward: np.ndarray, rule: AdvantageRule) -> np.ndarray:
    """Of N completions, drawn k at a time: the mean over the draws that hold one, standardised."""
    correct = reward >= rule.pass_from
    N, wrong = reward.size, int((~correct).sum())
    k = min(rule.pass_k, N)
    fail = math.comb(wrong, k) / math.comb(N, k)
    deviation = math.sqrt(fail * (1.0 - fail))
    if deviation == 0.0:  # every draw passes, or none does
        return np.zeros(N)
    fail_of_wrong = math.comb(wrong - 1, k - 1) / math.comb(N - 1, k - 1)
    return np.where(correct, fail, fail - fail_of_wrong) / deviation


_OF_GROUP: dict[str, Comparison] = {
    "group_norm": _group_norm,
    "group_centre": _group_centre,
    "leave_one_out": _leave_one_out,
    "pass_at_k": _pass_at_k,
    "group_centre_batch_norm": _group_centre,
}
_OVER_BATCH = ("batch_norm", "group_centre_batch_norm", "reward_norm")
KINDS = tuple(dict.fromkeys([*_OF_GROUP, *_OVER_BATCH, "gae"]))


def _over_batch(raw: Sequence[np.ndarray], eps: float, *, centre: bool) -> list[np.ndarray]:
    """Divides by the deviation of all numbers of the batch; where all are equal, all become 0."""
    every = np.concatenate([raw_G[np.isfinite(raw_G)] for raw_G in raw]) if raw else np.empty(0)
    if not has_variance(every):
        return [np.zeros(raw_G.shape) for raw_G in raw]
    return [(raw_G - centre * every.mean()) / (every.std() + eps) for raw_G in raw]
