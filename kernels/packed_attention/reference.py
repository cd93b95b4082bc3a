"""Attention over rows that pack several sequences: the definition, with whole scores.

A token sees itself and the tokens before it in its row that are of the same segment, and with a
window only the last of them. Segment 0 is padding: it sees nothing and gives zeros, and no gradient
comes from it. A segment's tokens stand in a row in the order of their positions, so that the
distance of two places in the row is that of their positions.

Dimension key:
    B: rows
    T: tokens of a row
    S: the same tokens as keys
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


def packed_attention(
    query_BTNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    segment_BT: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Causal attention within the segments of each row.

    Args:
        query_BTNH, key_BTKH, value_BTKH: any float dtype.
        segment_BT: integers; equal values in a row mark one sequence, 0 marks padding.
        operand_dtype: to which queries, keys, values and softmax weights are rounded before they
            are multiplied. Products are summed in float32; scores and softmax are float32.
        window: how many tokens each one sees, itself included; None for all before it.
        soft_cap: scores are held within it, by soft_cap tanh(score / soft_cap); None for no bound.

    Returns:
        [B, T, N, H] in the query's dtype.
    """
    B, T, N, H = query_BTNH.shape
    K = key_BTKH.shape[2]
    operand = lambda array: array.astype(operand_dtype)
    product = functools.partial(
        jnp.einsum, precision=precision_of(operand_dtype), preferred_element_type=jnp.float32
    )
    query_BTKGH = operand(query_BTNH).reshape(B, T, K, N // K, H)
    score_BKGTS = product("btkgh,bskh->bkgts", query_BTKGH, operand(key_BTKH)) * H**-0.5
    if soft_cap is not None:
        score_BKGTS = soft_cap * jnp.tanh(score_BKGTS / soft_cap)
    seen_BTS = causal_in_segment(segment_BT, window=window)
    score_BKGTS = jnp.where(seen_BTS[:, None, None], score_BKGTS, MASKED_SCORE)
    weight_BKGTS = operand(jax.nn.softmax(score_BKGTS, axis=-1))
    out_BTKGH = product("bkgts,bskh->btkgh", weight_BKGTS, operand(value_BTKH))
    out_BTNH = out_BTKGH.reshape(B, T, N, H)
    return jnp.where(segment_BT[..., None, None] != 0, out_BTNH, 0.0).astype(query_BTNH.dtype)


def causal_in_segment(segment_BT: jax.Array, *, window: int | None = None) -> jax.Array:
    """Which tokens of a packed row see which, bool [B, T, S].

    Padding is one more segment here, so that every token sees itself.
    """
    T = segment_BT.shape[1]
    seen_TS = jnp.tril(jnp.ones((T, T), bool))
    if window is not None:
        seen_TS &= jnp.triu(jnp.ones((T, T), bool), 1 - window)
    return seen_TS & (segment_BT[:, :, None] == segment_BT[:, None, :])


def precision_of(operand_dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """That of a product of such operands: float32 is not to be cut to bfloat16 or tf32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(operand_dtype) == jnp.float32 else None
