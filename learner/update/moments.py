"""Moments of an optimiser kept in bfloat16, rounded at random so that small changes count.

A second moment changes by a thousandth in an update, and neighbours in bfloat16 are a few
thousandths apart: rounded to the nearest one it would stay where it is. Rounded up with the
probability of what is cut off, it is right in the mean (stochastic rounding, as M. Croci et al.,
"Stochastic rounding: implementation, error analysis and applications", 2022, describe it).
"""

import itertools
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
        inner: floating leaves of its state that belong to a parameter are moments.
    """

    def map_moments(change, state):
        """The state with its moments changed."""

        def changed(leaf):
            return change(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return optax.tree.map_params(inner, changed, state)

    def init(params):
        state = inner.init(params)
        # optax asks for the state of a mark in the place of parameters: it has no moments.
        if all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(params)):
            state = map_moments(lambda leaf: leaf.astype(jnp.bfloat16), state)
        return RoundedState(jnp.zeros((), jnp.int32), state)

    def update(updates, state, params=None):
        key = jax.random.fold_in(jax.random.key(_SEED), state.count)
        numbers = itertools.count()
        moments = map_moments(lambda leaf: leaf.astype(jnp.float32), state.inner)
        updates, moments = inner.update(updates, moments, params)
        rounded = map_moments(
            lambda leaf: round_at_random(leaf, jax.random.fold_in(key, next(numbers))), moments
        )
        return updates, RoundedState(state.count + 1, rounded)

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
