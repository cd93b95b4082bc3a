"""What is added to the rewards of a group for the lengths of its completions.

Dimension key:
    G: completions of one prompt
"""

from typing import NamedTuple

import numpy as np


class LengthRule(NamedTuple):
    """What lengths cost; both are off as they stand. See AlgorithmConfig."""

    overlong_share: float | None = None
    """Last share of the allowed length within which the reward falls, by 1 at its end."""
    length_coef: float = 0.0
    """Weight of the reward for being short beside the others of the group."""
    correct_from: float = 1.0
    """Total reward from which a completion is correct."""

    @property
    def is_on(self) -> bool:
        """Whether lengths cost anything."""
        return self.overlong_share is not None or self.length_coef > 0


def length_rewards(
    tokens_G: np.ndarray,
    record_tokens_G: np.ndarray,
    total_G: np.ndarray,
    rule: LengthRule,
    *,
    max_completion_tokens: int,
) -> np.ndarray:
    """What is added to the total reward of each completion; float64 [G].

    * Soft overlong punishment of DAPO (arXiv:2503.14476, equation 13): 0 up to
      (1 - share) x max, then falling linearly to -1 at max.
    * Length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3), times the coefficient: with
      x = 0.5 - (length - shortest) / (longest - shortest) of the group, x where the completion is
      correct, min(0, x) where it is not; 0 where all have one length.

    Args:
        tokens_G: lengths of the completions.
        record_tokens_G: of each one's longest record, which `max_completion_tokens` bounds.
        total_G: float64; not finite where a completion has no reward: it is left out of shortest
            and longest.
        max_completion_tokens: of the rollout.
    """
    tokens_G = np.asarray(tokens_G, np.float64)
    added_G = np.zeros(tokens_G.shape)
    if rule.overlong_share is not None:
        buffer = rule.overlong_share * max_completion_tokens
        beyond_G = record_tokens_G - (max_completion_tokens - buffer)
        added_G -= np.clip(beyond_G / buffer, 0.0, 1.0)
    rewarded_G = np.isfinite(total_G)
    if rule.length_coef > 0 and rewarded_G.any():
        shortest, longest = tokens_G[rewarded_G].min(), tokens_G[rewarded_G].max()
        if longest > shortest:
            x_G = 0.5 - (tokens_G - shortest) / (longest - shortest)
            correct_G = np.where(rewarded_G, total_G, -np.inf) >= rule.correct_from
            added_G += rule.length_coef * np.where(correct_G, x_G, np.minimum(x_G, 0.0))
    return added_G
