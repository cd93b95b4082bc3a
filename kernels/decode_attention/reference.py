"""Attention of one new token per row over its row of a KV cache: the definition, in float32.

Dimension key:
    B: rows
    S: positions of the cache
    N: query heads (N = K G; head n uses key/value head n // G)
    K: key/value heads
    G: query heads per key/value head
    H: head size
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Attended(NamedTuple):
    """What one new token leaves behind."""

    out_BNH: jax.Array
    """[B, N, H] in the query's dtype."""
    key_BKSH: jax.Array
    """The cache with the new column, in its own dtype."""
    value_BKSH: jax.Array


def decode_attention(
    query_BNH: jax.Array,
    new_key_BKH: jax.Array,
    new_value_BKH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    position_B: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
) -> Attended:
    """Writes the new column of every row, then attends from it over all columns up to it.

    Args:
        query_BNH: any float dtype.
        new_key_BKH, new_value_BKH: any float dtype; rounded to the cache's.
        key_BKSH, value_BKSH: float caches whose column s holds position s of the row's sequence.
            Columns behind the position may hold anything finite.
        position_B: integers in [0, S): where the new token lies. Outside of it the row's result is
            undefined; other rows keep theirs.
        operand_dtype: to which queries, keys, values and softmax weights are rounded before they
            are multiplied. Products, sums and softmax are float32.
    """
    B, N, H = query_BNH.shape
    _, K, S, _ = key_BKSH.shape
    rounded = lambda array: array.astype(operand_dtype).astype(jnp.float32)
    new_BS = jnp.arange(S) == position_B[:, None]
    seen_BS = jnp.arange(S) <= position_B[:, None]
    write = lambda cache, new: jnp.where(
        new_BS[:, None, :, None], new[:, :, None].astype(cache.dtype), cache
    )
    key_BKSH = write(key_BKSH, new_key_BKH)
    value_BKSH = write(value_BKSH, new_value_BKH)
    query_BKGH = rounded(query_BNH).reshape(B, K, N // K, H)
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    score_BKGS = product("bkgh,bksh->bkgs", query_BKGH, rounded(key_BKSH)) * H**-0.5
    weight_BKGS = jax.nn.softmax(score_BKGS, axis=-1, where=seen_BS[:, None, None])
    out_BKGH = product("bkgs,bksh->bkgh", rounded(weight_BKGS), rounded(value_BKSH))
    return Attended(out_BKGH.reshape(B, N, H).astype(query_BNH.dtype), key_BKSH, value_BKSH)
