"""The head's two passes over one chunk of tokens, in plain XLA.

`score` multiplies hidden and head and keeps statistics; `gradient` turns the logits into their
gradient and multiplies it back, twice. What `score` keeps for `gradient` are the float32 logits of
the chunk; without them `gradient` multiplies again.

Dimension key:
    C: tokens of the chunk
    D: model width
    V: rows of the head given, which may be a part of the vocabulary
"""

import jax
import jax.numpy as jnp

from kernels.token_logprob import xla
from kernels.token_logprob.statistics import Slopes, Statistics, Support

LOGITS_BYTES = 320 * 2**20
"""Bound on the float32 logits of one chunk."""


def chunk_tokens(V: int, D: int) -> int:
    """Tokens of a chunk for a head [V, D]: as many as keep its logits in bounds, in eights."""
    return max(8, LOGITS_BYTES // (4 * V) // 8 * 8)


def score(
    hidden_CD: jax.Array,
    head_VD: jax.Array,
    ids_C: jax.Array,
    support: Support,
    *,
    first_column: jax.Array | int = 0,
    keep: bool,
) -> tuple[Statistics, jax.Array | None]:
    """Statistics of every token over these rows of the head, and what `gradient` may reuse.

    Args:
        hidden_CD: float; its dtype is that of the operands of every product.
        head_VD: rows first_column.. of the head.
        ids_C: int, numbered over the whole vocabulary.
        keep: whether to return the logits, float32 [C, V].
    """
    logits_CV = _logits(hidden_CD, head_VD)
    found = xla.statistics(logits_CV, ids_C, support, first_column=first_column)
    return found, logits_CV if keep else None


def gradient(
    hidden_CD: jax.Array,
    head_VD: jax.Array,
    ids_C: jax.Array,
    slopes: Slopes,
    support: Support,
    head_grad_VD: jax.Array,
    kept: jax.Array | None,
    *,
    first_column: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The gradient in hidden, over these rows of the head, and head_grad with its own added.

    Args:
        head_grad_VD: float32; the sum so far.
        kept: what `score` returned for the same tokens.

    Returns:
        float32 [C, D] and float32 [V, D].
    """
    logits_CV = _logits(hidden_CD, head_VD) if kept is None else kept
    d_logits_CV = xla.logits_gradient(logits_CV, ids_C, slopes, support, first_column=first_column)
    d_logits_CV = d_logits_CV.astype(hidden_CD.dtype)
    head_VD = head_VD.astype(hidden_CD.dtype)
    d_hidden_CD = jnp.matmul(d_logits_CV, head_VD, preferred_element_type=jnp.float32)
    d_head_VD = jnp.matmul(d_logits_CV.T, hidden_CD, preferred_element_type=jnp.float32)
    return d_hidden_CD, head_grad_VD + d_head_VD


def _logits(hidden_CD, head_VD):
    head_VD = head_VD.astype(hidden_CD.dtype)
    return jnp.matmul(hidden_CD, head_VD.T, preferred_element_type=jnp.float32)
