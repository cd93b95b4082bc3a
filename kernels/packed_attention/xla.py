"""`packed_attention` block by block in plain XLA: memory grows with T, and not with its square.

The scores of one block of queries against one block of keys are all that exists of them. Going
forward the softmax is kept as its largest score and its sum so far (FlashAttention,
arXiv:2205.14135, section 3.1); the backward pass makes the scores again from the logsumexp, as
there in section B.2. Blocks that have no segment in common are not visited.

Dimension key:
    B: rows
    T: queries of a row: its tokens, or those of the chunks
    R: tokens of a row, as keys
    C: chunks of a row that are queries
    Q: blocks of queries
    J: blocks of a row, as keys
    L: tokens of a block, as queries
    S: tokens of a block, as keys
    N: query heads (N = K G; head n uses key/value head n // G)
    K: key/value heads
    G: query heads per key/value head
    H: head size
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels.packed_attention.block_ranges import QueryBlocks, block_ranges
from kernels.packed_attention.reference import (
    KEPT_NAME,
    MASKED_SCORE,
    precision_of,
    query_places,
)

BLOCK_TOKENS = 256


class _Options(NamedTuple):
    """Static while a program is compiled."""

    operand_dtype: Any
    window: int | None
    soft_cap: float | None
    block_tokens: int


def packed_attention(
    query_BTNH: jax.Array,
    key_BRKH: jax.Array,
    value_BRKH: jax.Array,
    segment_BR: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    window: int | None = None,
    soft_cap: float | None = None,
    start_C: jax.Array | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> jax.Array:
    """Same contract as reference.packed_attention; softmax weights are rounded unnormalised."""
    chunk = query_BTNH.shape[1] // (1 if start_C is None else len(start_C))
    options = _Options(jnp.dtype(operand_dtype), window, soft_cap, min(block_tokens, chunk))
    return _packed_attention(options, query_BTNH, key_BRKH, value_BRKH, segment_BR, start_C)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed_attention(options, *given):
    return _forward(options, *given)[0]


def _forward(options, *given):
    row = _Blocks(options, *given)
    keys = row.ranges.keys

    def attend(place):
        b, i = place
        query_KGLH = row.query[b, i]

        def fold(j, carry):
            top_KGL, total_KGL, out_KGLH = carry
            score_KGLS, seen_LS = row.scores(query_KGLH, b, i, j)
            score_KGLS = jnp.where(seen_LS, score_KGLS, MASKED_SCORE)
            new_top_KGL = jnp.maximum(top_KGL, score_KGLS.max(axis=-1))
            weight_KGLS = jnp.where(seen_LS, jnp.exp(score_KGLS - new_top_KGL[..., None]), 0.0)
            kept_KGL = jnp.exp(top_KGL - new_top_KGL)
            total_KGL = total_KGL * kept_KGL + weight_KGLS.sum(axis=-1)
            added_KGLH = row.product("kgls,ksh->kglh", weight_KGLS, row.value[b, j])
            return new_top_KGL, total_KGL, out_KGLH * kept_KGL[..., None] + added_KGLH

        zeros_KGLH = jnp.zeros(query_KGLH.shape, jnp.float32)
        zeros_KGL = zeros_KGLH[..., 0]
        start = (jnp.full_like(zeros_KGL, MASKED_SCORE), zeros_KGL, zeros_KGLH)
        found = jax.lax.fori_loop(keys.first[b, i], keys.stop[b, i], fold, start)
        top_KGL, total_KGL, out_KGLH = found
        total_KGL = jnp.where(total_KGL > 0, total_KGL, 1.0)
        return out_KGLH / total_KGL[..., None], top_KGL + jnp.log(total_KGL)

    out, logsumexp = jax.lax.map(attend, row.query_places)
    return row.query_tokens(out, given[0].dtype), logsumexp


def _forward_and_keep(options, *given):
    found = _forward(options, *given)
    out_BTNH, logsumexp = (checkpoint_name(each, KEPT_NAME) for each in found)
    return out_BTNH, (given, out_BTNH, logsumexp)


def _backward(options, kept, d_out_BTNH):
    given, out_BTNH, logsumexp = kept
    row = _Blocks(options, *given)
    delta_BTN = (d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(axis=-1)
    delta = row.cut_queries(delta_BTN[..., None])[..., 0]
    d_out = row.cut_queries(d_out_BTNH.astype(options.operand_dtype))
    logsumexp = logsumexp.reshape(delta.shape)
    queries = row.ranges.queries

    def pull(d_query, place):
        b, j = place
        key_SKH, value_SKH = row.key[b, j], row.value[b, j]

        def fold(i, carry):
            d_query, d_key_KSH, d_value_KSH = carry
            query_KGLH, d_out_KGLH = row.query[b, i], d_out[b, i]
            score_KGLS, seen_LS = row.scores(query_KGLH, b, i, j)
            weight_KGLS = jnp.exp(score_KGLS - logsumexp[b, i][..., None])
            weight_KGLS = jnp.where(seen_LS, weight_KGLS, 0.0)
            d_value_KSH += row.product("kgls,kglh->ksh", weight_KGLS, d_out_KGLH)
            d_weight_KGLS = row.product("kglh,ksh->kgls", d_out_KGLH, value_SKH)
            d_score_KGLS = weight_KGLS * (d_weight_KGLS - delta[b, i][..., None])
            if options.soft_cap is not None:
                d_score_KGLS *= 1 - (score_KGLS / options.soft_cap) ** 2
            d_key_KSH += row.product("kgls,kglh->ksh", d_score_KGLS, query_KGLH)
            added_KGLH = row.product("kgls,ksh->kglh", d_score_KGLS, key_SKH)
            d_query = d_query.at[b, i].add(added_KGLH)
            return d_query, d_key_KSH, d_value_KSH

        zeros_KSH = jnp.zeros(key_SKH.shape, jnp.float32)
        start = (d_query, zeros_KSH, zeros_KSH)
        d_query, *found = jax.lax.fori_loop(queries.first[b, j], queries.stop[b, j], fold, start)
        return d_query, found

    d_query = jnp.zeros(row.query.shape, jnp.float32)
    d_query, (d_key, d_value) = jax.lax.scan(pull, d_query, row.key_places)
    query_BTNH, key_BRKH, value_BRKH, *_ = given
    return (
        row.query_tokens(d_query * row.scale, query_BTNH.dtype),
        row.key_tokens(d_key * row.scale, key_BRKH.dtype),
        row.key_tokens(d_value, value_BRKH.dtype),
        None,
        None,
    )


_packed_attention.defvjp(_forward_and_keep, _backward)


class _Blocks:
    """Rows cut into blocks, heads before tokens; what lacks to a block is filled with padding."""

    def __init__(self, options: _Options, query_BTNH, key_BRKH, value_BRKH, segment_BR, start_C):
        self._B, T, _, H = query_BTNH.shape
        self._options = options
        self._L, self._K = options.block_tokens, key_BRKH.shape[2]
        self._R = key_BRKH.shape[1]
        self._C = 1 if start_C is None else len(start_C)
        self._chunk = T // self._C
        self.scale = H**-0.5
        operand = lambda array: array.astype(options.operand_dtype)
        self.query = self.cut_queries(operand(query_BTNH))
        """[B, Q, K, G, L, H]."""
        self.key = self._cut(operand(key_BRKH)).swapaxes(2, 3)
        self.value = self._cut(operand(value_BRKH)).swapaxes(2, 3)
        """[B, J, K, S, H]."""
        segment_BR = segment_BR.astype(jnp.int32)
        place_T, segment_BT = query_places(segment_BR, start_C, T)
        self._key_segment_BJS = self._cut(segment_BR)
        self._queries = QueryBlocks(
            self._cut_chunks(segment_BT), self._cut_chunks(place_T[None])[0, :, 0]
        )
        self.ranges = block_ranges(self._key_segment_BJS, self._queries, window=options.window)
        self.query_places = _rows_and_blocks(self._B, self.query.shape[1])
        self.key_places = _rows_and_blocks(self._B, self.key.shape[1])
        self.product = functools.partial(_product, options.operand_dtype)

    def scores(self, query_KGLH, b, i, j):
        """Scores of a block of queries against a block of keys, and which of them count [L, S]."""
        score_KGLS = self.product("kglh,ksh->kgls", query_KGLH, self.key[b, j]) * self.scale
        soft_cap = self._options.soft_cap
        if soft_cap is not None:
            score_KGLS = soft_cap * jnp.tanh(score_KGLS / soft_cap)
        place_L = jnp.arange(self._L)
        distance_LS = self._queries.start_Q[i] - j * self._L + place_L[:, None] - place_L
        segment_L, segment_S = self._queries.segment_BQL[b, i], self._key_segment_BJS[b, j]
        seen_LS = (segment_L[:, None] == segment_S) & (segment_S != 0) & (distance_LS >= 0)
        if self._options.window is not None:
            seen_LS &= distance_LS < self._options.window
        return score_KGLS, seen_LS

    def cut_queries(self, array_BTNX):
        """[B, T, N, X] -> [B, Q, K, G, L, X]."""
        array = self._cut_chunks(array_BTNX)
        B, Q, L, N, X = array.shape
        return array.reshape(B, Q, L, self._K, N // self._K, X).transpose(0, 1, 3, 4, 2, 5)

    def _cut_chunks(self, array_BT):
        """[B, T, ..] -> [B, Q, L, ..], each chunk filled up by itself."""
        B, _, *rest = array_BT.shape
        chunks = self._cut(array_BT.reshape(B * self._C, self._chunk, *rest))
        return chunks.reshape(B, -1, self._L, *rest)

    def _cut(self, array_BR):
        B, R, *rest = array_BR.shape
        padded = jnp.pad(array_BR, [(0, 0), (0, -R % self._L), *[(0, 0)] * len(rest)])
        return padded.reshape(B, -1, self._L, *rest)

    def query_tokens(self, blocks, dtype):
        """All blocks of queries, as `key_tokens` -> [B, T, heads, X]."""
        chunks = self._tokens(blocks, self._B * self._C, self._chunk)
        return chunks.reshape(self._B, -1, *chunks.shape[2:]).astype(dtype)

    def key_tokens(self, blocks, dtype):
        """All blocks [.., heads, L, X], heads as one axis or as [K, G], -> [B, R, heads, X]."""
        return self._tokens(blocks, self._B, self._R).astype(dtype)

    def _tokens(self, blocks, rows, tokens):
        L, X = blocks.shape[-2:]
        J = -(-tokens // L)
        whole = blocks.reshape(rows, J, -1, L, X).swapaxes(2, 3)
        return whole.reshape(rows, J * L, -1, X)[:, :tokens]


def _rows_and_blocks(B, J):
    """Row and block of each block, in order; int32 [B J] each."""
    place = jnp.arange(B * J)
    return place // J, place % J


def _product(operand_dtype, equation, left, right):
    """Summed in float32."""
    return jnp.einsum(
        equation,
        left.astype(operand_dtype),
        right.astype(operand_dtype),
        precision=precision_of(operand_dtype),
        preferred_element_type=jnp.float32,
    )
