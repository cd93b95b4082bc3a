"""The KL penalty as a part of the reward, in place of one in the loss.

A completion's reward loses kl_coef times the sum of log sampled - log reference over its tokens,
and advantages are made of what is left. RLOO, arXiv:2402.14740, section 2; REINFORCE++,
arXiv:2501.03262, with the whole completion's sum at each of its tokens: the part before a token
does not depend on it, so that the expected gradient is the same.

Dimension key:
    G: completions of one prompt
    N: input tokens of one sequence
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from learner.objective.batching import TrainSequence
from learner.objective.loss import MAX_LOG_RATIO


class KlRewards(NamedTuple):
    """What the penalty adds to the rewards of a batch."""

    by_group: Mapping[str, np.ndarray]
    """float64 [G] by group_id, 0 where a completion has no reward."""
    mean: float
    """Of log sampled - log reference over all tokens, nats: an estimate of KL(sampled ||
    reference) per token; NaN without a token."""


def kl_rewards(
    sequences_G: Mapping[str, Sequence[Sequence[TrainSequence]]],
    reference_logprobs: Sequence[np.ndarray],
    kl_coef: float,
) -> KlRewards:
    """Works the penalty out.

    Args:
        sequences_G: by group_id, the records of the completions of a group; none where one has no
            reward.
        reference_logprobs: [N] of each record, in order; float32, nats.
        kl_coef: weight of the penalty.
    """
    scored = iter(reference_logprobs)
    by_group, total, tokens = {}, 0.0, 0
    for group_id, sequences in sequences_G.items():
        added_G = np.zeros(len(sequences))
        for i, record in ((i, one) for i, its in enumerate(sequences) for one in its):
            active, reference_N = record.active, next(scored)
            log_ratio = record.behavior_logprobs[active].astype(np.float64) - reference_N[active]
            divergence = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO).sum()
            added_G[i] -= kl_coef * divergence
            total, tokens = total + divergence, tokens + int(active.sum())
        by_group[group_id] = added_G
    return KlRewards(by_group, total / tokens if tokens else float("nan"))
