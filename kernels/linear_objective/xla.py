"""The head's two passes over one chunk of tokens, in plain XLA.

Both go through the head in blocks of rows, so that the float32 logits of one block are all that
exists of them. `score` multiplies and keeps statistics; `gradient` turns the logits into their
gradient and multiplies it back, twice. What `score` may keep for it are the logits of each block
less the block's own top, in the dtype of hidden: in 16 bits that is precise where the probability
is. Without them `gradient` multiplies again.

Dimension key:
    C: tokens of the chunk
    D: model width
    V: rows of the head given, which may be a part of the vocabulary
    R: rows of one block
    N: whole blocks
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.token_logprob import xla
from kernels.token_logprob.statistics import Slopes, Statistics, Support, merge

KEPT_BYTES = 320 * 2**20
"""Bound on what is kept of the logits of a chunk."""
BLOCK_BYTES = 64 * 2**20
"""Bound on the float32 logits of one block."""
MOST_TOKENS = 2048
"""Of a chunk: at these many the products outlast the traffic of the head's gradient, which every
chunk reads and writes."""


class LogitsBlock(NamedTuple):
    """The logits of some rows of the head, as `gradient` takes them; blocks may be stacked."""

    shifted: jax.Array
    """z less top, [C, R] in the dtype of hidden; -inf outside the support."""
    top: jax.Array
    """The largest z of each token, float32 [C]; 0 where the block has no support."""


class KeptBlocks(NamedTuple):
    """The logits of a chunk."""

    whole: LogitsBlock
    """Stacked along a first axis, [N, ..]."""
    rest: LogitsBlock | None
    """Of the rows that do not fill a block."""


def chunk_tokens(V: int, D: int, *, keep: bool, dtype: jnp.dtype) -> int:
    """Tokens of a chunk for a head [V, D] and hidden states of this dtype, in eights."""
    if not keep:
        return MOST_TOKENS
    return max(8, min(MOST_TOKENS, KEPT_BYTES // (dtype.itemsize * V) // 8 * 8))


def score(
    hidden_CD: jax.Array,
    head_VD: jax.Array,
    ids_C: jax.Array,
    support: Support,
    *,
    first_column: jax.Array | int = 0,
    keep: bool,
) -> tuple[Statistics, KeptBlocks | None]:
    """Statistics of every token over these rows of the head, and what `gradient` may reuse.

    Args:
        hidden_CD: float; its dtype is that of the operands of every product.
        head_VD: rows first_column.. of the head.
        ids_C: int, numbered over the whole vocabulary.
        keep: whether to keep the logits.
    """
    (C, _), V = hidden_CD.shape, head_VD.shape[0]
    R = block_rows(V, C)
    N = V // R

    def look(so_far, start, head_RD):
        column = first_column + start
        logits_CR = block_logits(hidden_CD, head_RD)
        found = xla.statistics(logits_CR, ids_C, support, first_column=column)
        so_far = merge(Statistics(*map(jnp.stack, zip(so_far, found, strict=True))))
        z_CR, _ = xla.scaled_logits(logits_CR, support, column)
        top_C = jnp.where(found.top == -jnp.inf, 0.0, found.top)
        return so_far, LogitsBlock((z_CR - top_C[:, None]).astype(hidden_CD.dtype), top_C)

    def step(i, carry):
        so_far, whole = carry
        so_far, block = look(so_far, i * R, jax.lax.dynamic_slice_in_dim(head_VD, i * R, R))
        if keep:
            place = jax.lax.dynamic_update_index_in_dim
            whole = jax.tree.map(lambda into, new: place(into, new, i, 0), whole, block)
        return so_far, whole

    zeros_C = jnp.zeros(C, jnp.float32)
    nothing = Statistics(jnp.full_like(zeros_C, -jnp.inf), zeros_C, zeros_C, zeros_C)
    whole, rest = None, None
    if keep:
        whole = LogitsBlock(jnp.zeros((N, C, R), hidden_CD.dtype), jnp.zeros((N, C), jnp.float32))
    found, whole = jax.lax.fori_loop(0, N, step, (nothing, whole))
    if V % R:
        found, rest = look(found, N * R, head_VD[N * R :])
    return found, None if whole is None else KeptBlocks(whole, rest)


def gradient(
    hidden_CD: jax.Array,
    head_VD: jax.Array,
    ids_C: jax.Array,
    slopes: Slopes,
    support: Support,
    head_grad_VD: jax.Array | None,
    kept: KeptBlocks | None,
    *,
    first_column: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient in hidden, over these rows of the head, and head_grad with its own added.

    Args:
        head_grad_VD: float32; the sum so far. None forms no gradient of the head.
        kept: what `score` returned for the same tokens.

    Returns:
        float32 [C, D] and float32 [V, D], or None in its place.
    """
    (C, _), V = hidden_CD.shape, head_VD.shape[0]
    R = block_rows(V, C)
    N = V // R

    def fold(so_far, start, head_RD, block):
        d_hidden_CD, head_grad_VD = so_far
        head_RD = head_RD.astype(hidden_CD.dtype)
        if block is None:
            z_CR, column_CR = xla.scaled_logits(
                block_logits(hidden_CD, head_RD), support, first_column + start
            )
            log_p_CR = z_CR - slopes.logsumexp[:, None]
        else:
            column_CR = jax.lax.broadcasted_iota(jnp.int32, block.shifted.shape, 1)
            column_CR += first_column + start
            drop_C = block.top - slopes.logsumexp
            log_p_CR = block.shifted.astype(jnp.float32) + drop_C[:, None]
        d_logits_CR = xla.gradient_at(log_p_CR, column_CR, ids_C, slopes).astype(hidden_CD.dtype)
        product = lambda left, right: jnp.matmul(left, right, preferred_element_type=jnp.float32)
        if head_grad_VD is not None:
            added_RD = product(d_logits_CR.T, hidden_CD)
            added_RD += jax.lax.dynamic_slice_in_dim(head_grad_VD, start, len(head_RD))
            head_grad_VD = jax.lax.dynamic_update_slice_in_dim(head_grad_VD, added_RD, start, 0)
        return d_hidden_CD + product(d_logits_CR, head_RD), head_grad_VD

    def step(i, so_far):
        block = None if kept is None else jax.tree.map(lambda stacked: stacked[i], kept.whole)
        return fold(so_far, i * R, jax.lax.dynamic_slice_in_dim(head_VD, i * R, R), block)

    start: Any = (jnp.zeros(hidden_CD.shape, jnp.float32), head_grad_VD)
    found = jax.lax.fori_loop(0, N, step, start)
    if V % R:
        found = fold(found, N * R, head_VD[N * R :], None if kept is None else kept.rest)
    return found


def block_rows(V: int, C: int) -> int:
    """Rows of one block of a head of V, for a chunk of C tokens."""
    return min(V, max(8, BLOCK_BYTES // (4 * C) // 8 * 8))


def block_logits(hidden_CD: jax.Array, head_RD: jax.Array) -> jax.Array:
    """float32 [C, R]; operands in the dtype of hidden."""
    head_RD = head_RD.astype(hidden_CD.dtype)
    return jnp.matmul(hidden_CD, head_RD.T, preferred_element_type=jnp.float32)
