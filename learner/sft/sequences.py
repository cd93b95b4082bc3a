"""Supervised training as an objective of the learner: cross entropy at the tokens that train.

Dimension key:
    N: input tokens of one sequence (the last of its tokens has no successor)
"""

import jax
import numpy as np

from learner.objective.batching import TrainSequence
from learner.objective.loss import Objective


def cross_entropy(*, logprob: jax.Array, **unused: jax.Array) -> jax.Array:
    """The policy term of supervised training, -log p of each token in nats; float32."""
    return -logprob


OBJECTIVE = Objective(
    clip_low=0.0,
    clip_high=0.0,
    kl_coef=0.0,
    kl_estimator="k3",
    entropy_coef=0.0,
    policy_loss=cross_entropy,
)
"""Neither ratio nor advantage is in it; bounds and coefficients have nothing to act on."""


def train_sequence(name: str, token_ids: np.ndarray, trains: np.ndarray) -> TrainSequence:
    """A sequence whose trained tokens all have the weight 1.

    Args:
        name: of messages.
        token_ids: int32 [N + 1].
        trains: bool [N + 1]; the first token has no predecessor and never trains.
    """
    none_N = np.zeros(len(token_ids) - 1, np.float32)
    one_N = np.ones_like(none_N)
    return TrainSequence(
        group_id=name,
        sample_index=0,
        token_ids=token_ids[:-1],
        target_ids=token_ids[1:],
        behavior_logprobs=none_N,
        old_logprobs=none_N,
        importance=one_N,
        weights=trains[1:].astype(np.float32),
        advantages=one_N,
    )
