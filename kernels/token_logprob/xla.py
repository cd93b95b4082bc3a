"""`token_logprob` in plain XLA: its two passes over the logits.

Each is compares, selects and reductions, which XLA fuses into passes that read the logits once: no
gather, no scatter, and no array of the logits' size besides the logits and their gradient.

Dimension key:
    V: columns of the logits given, which may be a part of the vocabulary
    ..: any leading dimensions
"""

import jax
import jax.numpy as jnp

from kernels.token_logprob.statistics import Slopes, Statistics, Support


def scaled_logits(
    logits: jax.Array, support: Support, first_column: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """float32 z with -inf outside the support, and the column number of each in the whole."""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) + first_column
    scaled = logits.astype(jnp.float32) * (1.0 / support.temperature)
    return jnp.where(column < support.columns, scaled, -jnp.inf), column


def statistics(
    logits: jax.Array, ids: jax.Array, support: Support, *, first_column: jax.Array | int = 0
) -> Statistics:
    """The first pass.

    Args:
        logits: float [.., V]; columns first_column.. of the vocabulary.
        ids: int [..], numbered over the whole vocabulary; any may lie outside.
        first_column: int32 scalar.
    """
    scaled, column = scaled_logits(logits, support, first_column)
    top = scaled.max(axis=-1)
    # A row of -inf has no largest entry to subtract: any finite number gives exp(-inf) = 0.
    shifted = scaled - jnp.where(top == -jnp.inf, 0.0, top)[..., None]
    weight = jnp.exp(shifted)
    return Statistics(
        top=top,
        total=weight.sum(axis=-1),
        weighted=jnp.where(shifted == -jnp.inf, 0.0, weight * shifted).sum(axis=-1),
        chosen=jnp.where(column == ids[..., None], scaled, 0.0).sum(axis=-1),
    )


def logits_gradient(
    logits: jax.Array,
    ids: jax.Array,
    slopes: Slopes,
    support: Support,
    *,
    first_column: jax.Array | int = 0,
) -> jax.Array:
    """The second pass: the gradient in the logits, in their dtype and shape."""
    scaled, column = scaled_logits(logits, support, first_column)
    log_p = scaled - slopes.logsumexp[..., None]
    return gradient_at(log_p, column, ids, slopes).astype(logits.dtype)


def gradient_at(log_p: jax.Array, column: jax.Array, ids: jax.Array, slopes: Slopes) -> jax.Array:
    """The gradient in the logits, float32, where their log-probabilities are known."""
    possible = log_p != -jnp.inf
    log_p = jnp.where(possible, log_p, 0.0)
    coefficient = slopes.shared[..., None] - slopes.entropy[..., None] * log_p
    gradient = jnp.where(possible, jnp.exp(log_p) * coefficient, 0.0)
    return gradient + jnp.where(column == ids[..., None], slopes.chosen[..., None], 0.0)
