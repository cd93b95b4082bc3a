"""The coefficient of the entropy bonus, steered towards a target entropy.

Source: Skywork-OR1, arXiv:2505.22312, adaptive entropy control. A level rises by `delta` after an
update whose mean entropy was below the target and falls by it after one above, within 0 and `most`;
the coefficient is the level where the entropy was at most the target, and 0 above it. The entropy
is that of the tokens in the loss, under the policy before the update, so that an update has the
coefficient of the measurement before its own. It is worked out where the update is applied, and is
a part of the state: a resume goes on with the very number.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class EntropyRule(NamedTuple):
    """How the coefficient moves; static while a step is compiled. See AlgorithmConfig."""

    target: float
    """Nats per token."""
    delta: float
    most: float


class EntropyBonus(NamedTuple):
    """The state of the control; float32 scalars."""

    level: Any
    coef: Any
    """What the entropy is weighed with in the next update."""


def first_bonus(coef: float) -> EntropyBonus:
    """Before any entropy is known."""
    return EntropyBonus(np.float32(coef), np.float32(coef))


def adjusted_bonus(bonus: EntropyBonus, entropy: jax.Array, rule: EntropyRule) -> EntropyBonus:
    """After an update.

    Args:
        entropy: float32 scalar; mean of the update's tokens, nats.
    """
    step = jnp.float32(rule.delta) * jnp.sign(rule.target - entropy)
    level = jnp.clip(bonus.level + step, 0.0, rule.most)
    return EntropyBonus(level, jnp.where(entropy <= rule.target, level, 0.0))
