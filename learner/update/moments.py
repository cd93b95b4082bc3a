"""Moments of an optimiser kept in bfloat16, rounded at random so that small changes count.

A second moment changes by a thousandth in an update, and neighbours in bfloat16 are a few
thousandths apart: rounded to the nearest one it would stay where it is. Rounded up with the
probability of what is cut off, it is right in the mean (stochastic rounding, as M. Croci et al.,
"Stochastic rounding: implementation, error analysis and applications", 2022, describe it).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

_SEED = 0
_CUT_BITS = 16
"""Of a float32 that a bfloat16 has not."""


class RoundedState(NamedTuple):
    """State of another optimiser, its moments in bfloat16."""

    count: Any
    """int32: updates so far; the random bits follow from it."""
    inner: Any


def rounded_moments(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimiser, which computes in float32 and keeps its moments in bfloat16.

    Args:
        inner: every floating leaf of its state is a moment.
    """

    def init(params):
        return RoundedState(jnp.zeros((), jnp.int32), _map_moments(_narrow, inner.init(params)))

    def update(updates, state, params=None):
        key = jax.random.fold_in(jax.random.key(_SEED), state.count)
        moments = _map_moments(lambda leaf: leaf.astype(jnp.float32), state.inner)
        updates, moments = inner.update(updates, moments, params)
        leaves, tree = jax.tree.flatten(moments)
        rounded = [
            round_at_random(leaf, jax.random.fold_in(key, place)) if _is_moment(leaf) else leaf
            for place, leaf in enumerate(leaves)
        ]
        return updates, RoundedState(state.count + 1, jax.tree.unflatten(tree, rounded))

    return optax.GradientTransformation(init, update)


def round_at_random(value: jax.Array, key: jax.Array) -> jax.Array:
    """float32 to one of its two neighbours in bfloat16, the nearer one more often.

    What a bfloat16 can hold stays as it is; what is not finite stays that.
    """
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    added = jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    raised = jnp.where(jnp.isfinite(value), bits + added, bits)
    upper = (raised >> _CUT_BITS).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


def _narrow(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.bfloat16)


def _map_moments(change, state: Any) -> Any:
    return jax.tree.map(lambda leaf: change(leaf) if _is_moment(leaf) else leaf, state)


def _is_moment(leaf: Any) -> bool:
    """Whether it is a floating array; optax also passes marks in the place of arrays."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
