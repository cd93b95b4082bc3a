"""Any per-token objective of a language model's head, summed over tokens: the definition.

The head turns a hidden vector into the distribution of the next token. An objective needs of that
distribution only the logprob of one id and the entropy, so the logits are an intermediate that
need never exist at once. Here they do: this is what the implementations are checked against.

Dimension key:
    T: tokens
    D: model width
    V: vocabulary (rows of the head)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.token_logprob import reference

Objective = Callable[[jax.Array, jax.Array, Any], jax.Array]
"""(logprob_N, entropy_N, data) -> loss_N, float32 [N], for any N.

A pure function of each token by itself: the leaves of `data` have N as their first axis, and token
n of the result depends on token n of the arguments alone. It may close over Python numbers, not
over traced arrays: those belong into `data`.
"""


class LinearObjective(NamedTuple):
    """What one call returns; float32, in nats."""

    loss: jax.Array
    """Scalar: the objective, summed over the active tokens."""
    logprob_T: jax.Array
    """log p(id) of each active token; 0 elsewhere."""
    entropy_T: jax.Array
    """Entropy of each active token's distribution; 0 elsewhere."""


def linear_objective(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    data: Any,
    objective: Objective,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> LinearObjective:
    """Sums `objective` over the active tokens of softmax(hidden head^T / temperature).

    Args:
        hidden_TD: float [T, D].
        head_VD: float [V, D].
        ids_T: int [T]; as `token_logprob` has them: an impossible id has logprob -inf and passes
            no gradient.
        active_T: bool [T]; what inactive tokens hold, ids and data included, reaches neither
            value nor gradient. None where all are active.
        data: pytree of arrays [T, ..] for the objective.
        temperature, valid_vocab: as `token_logprob` has them.

    Returns:
        LinearObjective, differentiable in hidden, head and the floats of data.
    """
    hidden_TD = hidden_TD.astype(jnp.float32)
    if active_T is not None:
        hidden_TD = jnp.where(active_T[:, None], hidden_TD, 0.0)
    logits_TV = jnp.matmul(hidden_TD, head_VD.astype(jnp.float32).T, precision="highest")
    scored = reference.token_logprob(
        logits_TV, ids_T, temperature=temperature, valid_vocab=valid_vocab
    )
    return sum_objective(scored.logprob, scored.entropy, active_T, data, objective)


def sum_objective(
    logprob_T: jax.Array,
    entropy_T: jax.Array,
    active_T: jax.Array | None,
    data: Any,
    objective: Objective,
) -> LinearObjective:
    """The outputs, from every token's logprob and entropy."""
    if active_T is None:
        return LinearObjective(objective(logprob_T, entropy_T, data).sum(), logprob_T, entropy_T)
    # Inactive tokens are replaced before the objective as well as after it, so that garbage there
    # cannot turn a zero derivative into 0 * inf.
    logprob_T = jnp.where(active_T, logprob_T, 0.0)
    entropy_T = jnp.where(active_T, entropy_T, 0.0)
    loss_T = objective(logprob_T, entropy_T, mask_data(data, active_T))
    return LinearObjective(jnp.where(active_T, loss_T, 0.0).sum(), logprob_T, entropy_T)


def mask_data(data: Any, active_T: jax.Array) -> Any:
    """The floats of `data` with zeros at the inactive tokens; other leaves as they are."""

    def masked(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(active_T.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)

    return jax.tree.map(masked, data)
