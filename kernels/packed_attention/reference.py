"""Attention over rows that pack several sequences: the definition, with whole scores.

A token sees itself and the tokens before it in its row that are of the same segment, and with a
window only the last of them. Segment 0 is padding: it sees nothing and gives zeros, and no gradient
comes from it. A segment's tokens stand in a row in the order of their positions, so that the
distance of two places in the row is that of their positions.

The queries may be those of a part of the row alone, of chunks of equal length, and the result is
then that part of the whole: so devices can share a row.

Dimension key:
    B: rows
    T: queries of a row: its tokens, or those of the chunks
    S: tokens of a row, as keys
    C: chunks of a row that are queries
    N: query heads (N = K G; head n uses key/value head n // G)
    K: key/value heads
    G: query heads per key/value head
    H: head size
"""

import functools

import jax
import jax.numpy as jnp

MASKED_SCORE = -1e30
"""Finite: a difference of two is no NaN."""
KEPT_NAME = "attention"
"""Of what a policy of `jax.checkpoint` may keep, so that attention is not computed again: the
result, and where there is one the logsumexp of the scores."""


def packed_attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    segment_BS: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    window: int | None = None,
    soft_cap: float | None = None,
    start_C: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within the segments of each row.

    Args:
        query_BTNH, key_BSKH, value_BSKH: any float dtype.
        segment_BS: integers; equal values in a row mark one sequence, 0 marks padding.
        operand_dtype: to which queries, keys, values and softmax weights are rounded before they
            are multiplied. Products are summed in float32; scores and softmax are float32.
        window: how many tokens each one sees, itself included; None for all before it.
        soft_cap: scores are held within it, by soft_cap tanh(score / soft_cap); None for no bound.
        start_C: integers, ascending; where in the row each chunk of T / C queries begins. None
            where the queries are those of the whole row.

    Returns:
        [B, T, N, H] in the query's dtype.
    """
    B, T, N, H = query_BTNH.shape
    K = key_BSKH.shape[2]
    operand = lambda array: array.astype(operand_dtype)
    product = functools.partial(
        jnp.einsum, precision=precision_of(operand_dtype), preferred_element_type=jnp.float32
    )
    query_BTKGH = operand(query_BTNH).reshape(B, T, K, N // K, H)
    score_BKGTS = product("btkgh,bskh->bkgts", query_BTKGH, operand(key_BSKH)) * H**-0.5
    if soft_cap is not None:
        score_BKGTS = soft_cap * jnp.tanh(score_BKGTS / soft_cap)
    place_T, segment_BT = query_places(segment_BS, start_C, T)
    seen_BTS = causal_in_segment(place_T, segment_BT, segment_BS, window=window)
    score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, MASKED_SCORE)
    weight_BKGTS = operand(jax.nn.softmax(score_BKGTS, axis=-1))
    out_BTKGH = product("bkgts,bskh->btkgh", weight_BKGTS, operand(value_BSKH))
    out_BTNH = out_BTKGH.reshape(B, T, N, H)
    return jnp.where(segment_BT[..., None, None] != 0, out_BTNH, 0.0).astype(query_BTNH.dtype)


def query_places(
    segment_BS: jax.Array, start_C: jax.Array | None, T: int
) -> tuple[jax.Array, jax.Array]:
    """Where in the row each query stands, int32 [T], and its segment [B, T]."""
    if start_C is None:
        return jnp.arange(T, dtype=jnp.int32), segment_BS
    in_chunk = jnp.arange(T // len(start_C), dtype=jnp.int32)
    place_T = (start_C.astype(jnp.int32)[:, None] + in_chunk).reshape(-1)
    return place_T, segment_BS[:, place_T]


def causal_in_segment(
    place_T: jax.Array, segment_BT: jax.Array, segment_BS: jax.Array, *, window: int | None = None
) -> jax.Array:
    """Which queries see which tokens of their packed row, bool [B, T, S].

    Padding is one more segment here, so that every token sees itself.

    Args:
        place_T, segment_BT: of the queries.
    """
    distance_TS = place_T[:, None] - jnp.arange(segment_BS.shape[1], dtype=jnp.int32)
    seen_TS = distance_TS >= 0
    if window is not None:
        seen_TS &= distance_TS < window
    return seen_TS & (segment_BT[:, :, None] == segment_BS[:, None, :])


def precision_of(operand_dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """That of a product of such operands: float32 is not to be cut to bfloat16 or tf32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(operand_dtype) == jnp.float32 else None
