"""`token_logprob` in plain XLA with its derivative written out.

Forward and backward are compares, selects and reductions over the logits, which XLA fuses into
passes that read them once: no gather, no scatter, and no array of the logits' size besides the
logits and their gradient. Derivatives in the scaled logits z = logits / temperature, with
p = softmax(z) and H the entropy:

    d logprob / dz_v   = [v = id] - p_v
    d logsumexp / dz_v = p_v
    d H / dz_v         = -p_v (log p_v + H)

Dimension key:
    V: vocabulary
    ..: any leading dimensions
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.token_logprob.reference import TokenLogprob


def token_logprob(
    logits: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> TokenLogprob:
    """Same contract as reference.token_logprob."""
    support = logits.shape[-1] if valid_vocab is None else valid_vocab
    outputs: Any = _token_logprob(logits, ids, temperature, support)
    return TokenLogprob(*outputs)


def _scaled(logits, temperature, support):
    """float32 z with -inf outside the support, and the column numbers beside it."""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    scaled = logits.astype(jnp.float32) / temperature
    return jnp.where(column < support, scaled, -jnp.inf), column


def _statistics(logits, ids, temperature, support):
    scaled, column = _scaled(logits, temperature, support)
    top = scaled.max(axis=-1)
    # A row of -inf has no largest entry to subtract: any finite number gives exp(-inf) = 0.
    top = jnp.where(top == -jnp.inf, 0.0, top)
    shifted = scaled - top[..., None]
    weight = jnp.exp(shifted)
    total = weight.sum(axis=-1)
    weighted = jnp.where(shifted == -jnp.inf, 0.0, weight * shifted).sum(axis=-1)
    chosen = jnp.where(column == ids[..., None], shifted, 0.0).sum(axis=-1)

    log_total = jnp.log(total)
    empty = total == 0.0
    inside = (ids >= 0) & (ids < support) & ~empty
    logprob = jnp.where(inside, chosen - log_total, -jnp.inf)
    entropy = jnp.where(empty, 0.0, log_total - weighted / jnp.where(empty, 1.0, total))
    return logprob, log_total + top, entropy


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _token_logprob(logits, ids, temperature, support):
    return _statistics(logits, ids, temperature, support)


def _forward(logits, ids, temperature, support):
    logprob, logsumexp, entropy = _statistics(logits, ids, temperature, support)
    return (logprob, logsumexp, entropy), (logits, ids, logprob, logsumexp, entropy)


def _backward(temperature, support, residuals, cotangents):
    logits, ids, logprob, logsumexp, entropy = residuals
    d_logprob, d_logsumexp, d_entropy = cotangents
    d_logprob = jnp.where(logprob == -jnp.inf, 0.0, d_logprob)

    scaled, column = _scaled(logits, temperature, support)
    possible = scaled != -jnp.inf
    log_p = jnp.where(possible, scaled - logsumexp[..., None], 0.0)
    p_coefficient = (d_logsumexp - d_logprob)[..., None] - d_entropy[..., None] * (
        log_p + entropy[..., None]
    )
    d_scaled = jnp.where(possible, jnp.exp(log_p) * p_coefficient, 0.0)
    d_scaled += jnp.where(column == ids[..., None], d_logprob[..., None], 0.0)
    return (d_scaled / temperature).astype(logits.dtype), np.zeros(ids.shape, jax.dtypes.float0)


_token_logprob.defvjp(_forward, _backward)
