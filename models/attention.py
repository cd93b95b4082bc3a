"""Grouped-query attention over keys and values that were computed elsewhere.

Dimension key:
    B: sequences
    T: query tokens
    S: key slots
    N: query heads
    K: key/value heads
    G: query heads per key/value head (N = K G)
    H: head size
"""

import jax
import jax.numpy as jnp

MASKED_SCORE = -1e30
"""Finite, so that a row without a visible key gives finite values, which are not used."""


def attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    visible_BTS: jax.Array,
    *,
    operand_dtype: jnp.dtype,
) -> jax.Array:
    """Scaled dot-product attention; key/value heads are never repeated in memory.

    Args:
        query_BTNH: any float dtype.
        key_BSKH, value_BSKH: any float dtype.
        visible_BTS: bool; which slots a query token may look at.
        operand_dtype: dtype of both matrix products' inputs; they accumulate in float32, and
            scores and softmax are float32.

    Returns:
        [B, T, N, H] in the query's dtype.
    """
    B, T, N, H = query_BTNH.shape
    K = key_BSKH.shape[2]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H).astype(operand_dtype)
    score_BKGTS = jnp.einsum(
        "btkgh,bskh->bkgts",
        query_BTKGH,
        key_BSKH.astype(operand_dtype),
        preferred_element_type=jnp.float32,
    )
    score_BKGTS = jnp.where(visible_BTS[:, None, None], score_BKGTS * H**-0.5, MASKED_SCORE)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(operand_dtype)
    out_BTKGH = jnp.einsum(
        "bkgts,bskh->btkgh",
        weight_BKGTS,
        value_BSKH.astype(operand_dtype),
        preferred_element_type=jnp.float32,
    )
    return out_BTKGH.reshape(B, T, N, H).astype(query_BTNH.dtype)
