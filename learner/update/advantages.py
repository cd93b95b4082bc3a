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

    Returns:
        float32 [G] for each group, in order.

    Raises:
        ValueError: if the kind is unknown.
    """
    if rule.kind in _OF_GROUP:
        of_group = _OF_GROUP[rule.kind]
        return [_rewarded(group.total_G, lambda r: of_group(r, rule)) for group in groups]
    if rule.kind == "batch_norm":
        raw = [np.asarray(group.total_G, np.float64) for group in groups]
        return _normed_over_batch(raw, rule.eps, centre=True)
    if rule.kind == "group_centre_batch_norm":
        raw = [_centred(group.total_G) for group in groups]
        return _normed_over_batch(raw, rule.eps, centre=False)
    if rule.kind == "reward_norm":
        raw = [_summed_norms(group, rule) for group in groups]
        return _normed_over_batch(raw, rule.eps, centre=True)
    raise ValueError(f"advantage must be one of {', '.join(KINDS)}, got {rule.kind!r}")


def has_variance(reward_G: np.ndarray) -> bool:
    """Whether a group says anything: at least two rewards, and not all the same.

    Equality is exact. A deviation computed in floating point is no test, since equal rewards
    such as 0.35 can leave a residue above zero.
    """
    reward_G = np.asarray(reward_G, np.float64)
    reward = reward_G[np.isfinite(reward_G)]
    return reward.size > 1 and reward.min() != reward.max()


def _rewarded(
    reward_G: np.ndarray, advantages: Callable[[np.ndarray], np.ndarray], missing: float = 0.0
) -> np.ndarray:
    """Advantages of the completions that have a reward, `missing` for the others; float32."""
    reward_G = np.asarray(reward_G, np.float64)
    found_G = np.full(reward_G.shape, missing, np.float64)
    rewarded_G = np.isfinite(reward_G)
    if has_variance(reward_G):
        found_G[rewarded_G] = advantages(reward_G[rewarded_G])
    else:
        found_G[rewarded_G] = 0.0
    return found_G.astype(np.float32) if missing == 0.0 else found_G


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


_OF_GROUP = {
    "group_norm": _group_norm,
    "group_centre": _group_centre,
    "leave_one_out": _leave_one_out,
    "pass_at_k": _pass_at_k,
}
KINDS = (*_OF_GROUP, "batch_norm", "group_centre_batch_norm", "reward_norm")


def _centred(reward_G: np.ndarray) -> np.ndarray:
    """float64 [G], NaN where a completion has no reward."""
    return _rewarded(reward_G, lambda reward: reward - reward.mean(), missing=np.nan)


def _summed_norms(group: GroupRewards, rule: AdvantageRule) -> np.ndarray:
    """float64 [G], NaN where a completion has no reward."""
    if group.each_RG is None or group.weight_R is None:
        raise ValueError("advantage=reward_norm needs the rewards of each reward function")
    sum_G = np.where(np.isfinite(np.asarray(group.total_G, np.float64)), 0.0, np.nan)
    for weight, reward_G in zip(group.weight_R, group.each_RG, strict=True):
        sum_G += weight * _rewarded(reward_G, lambda reward: _group_norm(reward, rule))
    return sum_G


def _normed_over_batch(raw: Sequence[np.ndarray], eps: float, *, centre: bool) -> list[np.ndarray]:
    """Divides by the deviation of all finite values of the batch; a batch of one value gives 0."""
    every = np.concatenate([raw_G[np.isfinite(raw_G)] for raw_G in raw]) if raw else np.empty(0)
    if not has_variance(every):
        return [np.zeros(raw_G.shape, np.float32) for raw_G in raw]
    mean = every.mean() if centre else 0.0
    deviation = (every - every.mean()).std() + eps
    return [
        np.where(np.isfinite(raw_G), (raw_G - mean) / deviation, 0.0).astype(np.float32)
        for raw_G in raw
    ]
