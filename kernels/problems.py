"""Problems that the instruments of this package pose: data, an objective, programs to measure.

Dimension key:
    N: tokens
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GrpoData(NamedTuple):
    """What the clipped surrogate needs of each token; float32 [N]."""

    behavior_logprob_N: jax.Array
    advantage_N: jax.Array


def grpo_objective(logprob_N: jax.Array, entropy_N: jax.Array, data: GrpoData) -> jax.Array:
    """The clipped surrogate of PPO with clip 0.2 and an entropy bonus of 0.01; float32 [N].

    learner/loss.py has the objectives that are trained with; this one stands for them where the
    learner may not be imported.
    """
    ratio_N = jnp.exp(jnp.clip(logprob_N - data.behavior_logprob_N, -20.0, 20.0))
    clipped_N = jnp.clip(ratio_N, 0.8, 1.2)
    surrogate_N = jnp.minimum(ratio_N * data.advantage_N, clipped_N * data.advantage_N)
    return -surrogate_N - 0.01 * entropy_N
