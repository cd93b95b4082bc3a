"""`linear_objective` as a differentiable function, on one device or under `shard_map`.

Dimension key:
    T: tokens
    D: model width
    V: vocabulary (rows of the head)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from kernels.linear_objective.reference import LinearObjective, Objective, sum_objective
from kernels.linear_objective.schedule import HeadOptions, pull_back, score, value_and_gradients
from kernels.token_logprob.reference import TokenLogprob

__all__ = ["HeadOptions", "LinearObjective", "linear_objective"]


def linear_objective(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    data: Any,
    objective: Objective,
    options: HeadOptions,
) -> LinearObjective:
    """Same contract as reference.linear_objective, with its arguments checked.

    Under `jax.grad` the gradient of the loss is formed in the forward pass and scaled in the
    backward pass. Cotangents of the per-token outputs are served as well, by a second pass that
    runs only where they are asked for.

    Args:
        options: schedule, implementation, temperature and support; with a `vocab_axis` see
            `kernels.linear_objective.sharded`.

    Raises:
        ValueError: if the arrays do not belong together.
    """
    check(hidden_TD, head_VD, ids_T, active_T, data)
    if options.vocab_axis is not None:
        raise ValueError("a vocab_axis needs kernels.linear_objective.sharded")
    floats, rest = _split(data)

    @jax.custom_vjp
    def operation(hidden_TD, head_VD, floats, ids_T, active_T, rest):
        scores = score(hidden_TD, head_VD, ids_T, active_T, options)
        data = _join(floats, rest)
        return sum_objective(scores.logprob, scores.entropy, active_T, data, objective)

    def forward(*arguments):
        hidden_TD, head_VD, floats, ids_T, active_T, rest = jax.tree.map(
            lambda argument: argument.value, arguments, is_leaf=lambda x: hasattr(x, "perturbed")
        )
        data = _join(floats, rest)
        found = value_and_gradients(hidden_TD, head_VD, ids_T, active_T, data, objective, options)
        scores = found.scores
        out = sum_objective(scores.logprob, scores.entropy, active_T, data, objective)
        return out, (hidden_TD, head_VD, floats, ids_T, active_T, rest, found)

    def backward(residuals, cotangents):
        hidden_TD, head_VD, floats, ids_T, active_T, rest, found = residuals
        d_loss, d_logprob_T, d_entropy_T = (
            None if isinstance(each, SymbolicZero) else each for each in cotangents
        )
        zeros_T = jnp.zeros(ids_T.shape, jnp.float32)
        d_hidden_TD, d_head_VD = jnp.zeros(hidden_TD.shape), jnp.zeros(head_VD.shape)
        d_floats = jax.tree.map(jnp.zeros_like, floats)
        if d_loss is not None:
            d_hidden_TD += d_loss * found.hidden_TD
            d_head_VD += d_loss * found.head_VD
            loss = lambda floats: sum_objective(
                found.scores.logprob, found.scores.entropy, active_T, _join(floats, rest), objective
            ).loss
            d_floats = jax.vjp(loss, floats)[1](d_loss)[0]
        if d_logprob_T is not None or d_entropy_T is not None:
            extra = pull_back(
                hidden_TD,
                head_VD,
                ids_T,
                active_T,
                TokenLogprob(
                    zeros_T if d_logprob_T is None else d_logprob_T,
                    zeros_T,
                    zeros_T if d_entropy_T is None else d_entropy_T,
                ),
                options,
            )
            d_hidden_TD += extra.hidden_TD
            d_head_VD += extra.head_VD
        return (
            d_hidden_TD.astype(hidden_TD.dtype),
            d_head_VD.astype(head_VD.dtype),
            d_floats,
            *jax.tree.map(_no_gradient, (ids_T, active_T, rest)),
        )

    operation.defvjp(forward, backward, symbolic_zeros=True)
    return operation(hidden_TD, head_VD, floats, ids_T, active_T, rest)


def check(hidden_TD, head_VD, ids_T, active_T, data) -> None:
    """Refuses arrays that do not belong together.

    Raises:
        ValueError: with the shapes and the rule.
    """
    if hidden_TD.ndim != 2 or head_VD.ndim != 2 or head_VD.shape[1] != hidden_TD.shape[1]:
        raise ValueError(
            f"hidden must be [T, D] and head [V, D] of the same width D, got {hidden_TD.shape} "
            f"and {head_VD.shape}"
        )
    T = hidden_TD.shape[0]
    if T == 0:
        raise ValueError(f"hidden must hold at least 1 token, got {hidden_TD.shape}")
    if ids_T.shape != (T,) or not jnp.issubdtype(ids_T.dtype, jnp.integer):
        raise ValueError(f"ids must be integers of shape {(T,)}, got {ids_T.dtype} {ids_T.shape}")
    if active_T is not None and (active_T.shape != (T,) or active_T.dtype != jnp.bool_):
        raise ValueError(
            f"active must be bool of shape {(T,)}, got {active_T.dtype} {active_T.shape}"
        )
    for leaf in jax.tree.leaves(data):
        if leaf.shape[:1] != (T,):
            raise ValueError(f"leaves of data must have T={T} as first axis, got {leaf.shape}")


def _split(data):
    """The float leaves and the others, each as a tree with None in the places of the rest."""
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    floats = jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, data)
    return floats, jax.tree.map(lambda leaf: None if is_float(leaf) else leaf, data)


def _join(floats, rest):
    return jax.tree.map(
        lambda one, other: other if one is None else one, floats, rest, is_leaf=lambda x: x is None
    )


def _no_gradient(leaf):
    return np.zeros(leaf.shape, jax.dtypes.float0)
