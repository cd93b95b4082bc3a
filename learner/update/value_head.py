"""The critic of PPO: a linear head on the policy's last hidden states, with its loss.

Policy and critic share all layers, so the loss of the critic, times its coefficient, shapes these
too (PPO, arXiv:1707.06347, equation 9). The head is a part of the learner's parameters under a name
of its own, float32 and whole on every device: `policy_params` is what is left without it, which is
all that is scored, published and exported.

Dimension key:
    B: rows of a micro-batch
    T: token slots of a row
    D: model width
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from learner.objective.loss import weighted_sum
from models.transformer import Params

NAME = "value_head"
"""Of its tree among the top-level trees of the parameters."""


def with_value_head(params: Params, width: int) -> Params:
    """The parameters with a head of zeros for a model of this width: every value is 0 at first."""
    head = {"weight": np.zeros(width, np.float32), "bias": np.zeros(1, np.float32)}
    return {**params, NAME: head}


def head_parameters(width: int) -> int:
    """How many parameters the head has."""
    return width + 1


def policy_params(params: dict[str, Any]) -> dict[str, Any]:
    """The tree without the value head; the same where there is none.

    Args:
        params: arrays, shape structs or PartitionSpecs.
    """
    return {name: tree for name, tree in params.items() if name != NAME}


def token_values(head: Params, hidden_BTD: jax.Array) -> jax.Array:
    """The critic's value of each token, before it is drawn; float32 [B, T], in units of reward.

    Args:
        head: the tree under NAME.
        hidden_BTD: of any float dtype; the state at t, which has seen the tokens up to t, gives the
            value of the one after it, as it gives its logprob.
    """
    return (hidden_BTD.astype(jnp.float32) * head["weight"]).sum(axis=-1) + head["bias"]


def value_terms(
    value_BT: jax.Array,
    old_value_BT: jax.Array,
    return_BT: jax.Array,
    active_BT: jax.Array,
    value_clip: float | None,
) -> tuple[jax.Array, jax.Array]:
    """The critic's loss of each token, float32 [B, T], and whether the clip held it, bool.

    (V - R)^2 / 2; with a clip the larger of that and the same of V held within old V +- value_clip,
    which has no gradient. Source: the code of arXiv:1909.08593 (and of PPO, arXiv:1707.06347).

    Args:
        value_BT: float32, differentiated.
        old_value_BT, return_BT: float32; before the first update on the batch.
        active_BT: bool; what lies elsewhere reaches neither value nor gradient.
        value_clip: in units of reward; None for no clip.
    """
    value_BT = jnp.where(active_BT, value_BT, 0.0)
    old_value_BT = jnp.where(active_BT, old_value_BT, 0.0)
    return_BT = jnp.where(active_BT, return_BT, 0.0)
    loss_BT = 0.5 * jnp.square(value_BT - return_BT)
    if value_clip is None:
        return loss_BT, jnp.zeros_like(active_BT)
    moved_BT = jnp.clip(value_BT - old_value_BT, -value_clip, value_clip)
    held_BT = 0.5 * jnp.square(old_value_BT + moved_BT - return_BT)
    is_held_BT = (moved_BT != value_BT - old_value_BT) & (held_BT > loss_BT)
    return jnp.where(is_held_BT, held_BT, loss_BT), is_held_BT


def value_gradients(
    head: Params,
    hidden_BTD: jax.Array,
    old_value_BT: jax.Array,
    return_BT: jax.Array,
    weight_BT: jax.Array,
    value_clip: float | None,
) -> tuple[dict[str, jax.Array], Params, jax.Array]:
    """This device's part of the critic's loss, and its gradients.

    Args:
        weight_BT: float32; above 0 where a token is in the loss.

    Returns:
        Sums over the tokens, float32 scalars: `value_loss`, weighted, and the number of tokens
        `value_clipped`; the gradients of `value_loss` in the head and in hidden, float32 [B, T, D].
    """
    active_BT = weight_BT > 0

    def summed(head, hidden_BTD):
        loss_BT, held_BT = value_terms(
            token_values(head, hidden_BTD), old_value_BT, return_BT, active_BT, value_clip
        )
        return weighted_sum(loss_BT, weight_BT), (held_BT & active_BT).sum(dtype=jnp.float32)

    (loss, clipped), (d_head, d_hidden_BTD) = jax.value_and_grad(
        summed, argnums=(0, 1), has_aux=True
    )(head, hidden_BTD.astype(jnp.float32))
    return {"value_loss": loss, "value_clipped": clipped}, d_head, d_hidden_BTD
