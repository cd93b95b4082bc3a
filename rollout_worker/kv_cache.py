"""Keys and values of the tokens so far: one static buffer per layer, written slot by slot.

Prompts are padded on the left, so that all rows of a batch write their next token into the same
slot and a row's position is `slot - pad_B`. Padding is hidden by the mask, never by token id.

Dimension key:
    B: rows
    T: prompt slots
    S: cache slots (prompt and completion)
    N: query heads
    K: key/value heads
    H: head size
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention import attention
from models.transformer import Attend


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    key_BSKH: jax.Array
    value_BSKH: jax.Array


def check_geometry(
    *,
    prompt_tokens: int,
    completion_tokens: int,
    cache_tokens: int,
    max_position_embeddings: int,
) -> None:
    """Refuses lengths that would write past the cache or past the positions the model knows.

    Raises:
        ValueError: with the numbers and the rule.
    """
    needed = prompt_tokens + completion_tokens
    if prompt_tokens < 1 or completion_tokens < 1:
        raise ValueError(
            f"nothing to generate: prompt of {prompt_tokens} and completion of "
            f"{completion_tokens} tokens must both be at least 1"
        )
    if needed > cache_tokens:
        raise ValueError(
            f"{prompt_tokens} prompt + {completion_tokens} completion tokens need {needed} "
            f"positions, but the KV cache holds {cache_tokens}: a clamped write would overwrite "
            "its last slot"
        )
    if needed > max_position_embeddings:
        raise ValueError(
            f"{prompt_tokens} prompt + {completion_tokens} completion tokens reach position "
            f"{needed - 1}, but the model was trained for max_position_embeddings="
            f"{max_position_embeddings}: lower max_prompt_tokens or max_completion_tokens"
        )


def prefill_attend(pad_B: jax.Array, T: int, *, operand_dtype: jnp.dtype) -> Attend:
    """Causal attention over left-padded prompts; each layer's cache comes out [B, T, K, H]."""
    slot_T = jnp.arange(T)
    causal_TS = slot_T[None, :] <= slot_T[:, None]
    visible_BTS = causal_TS[None] & (slot_T[None, None, :] >= pad_B[:, None, None])

    def attend(query, key, value, _):
        out = attention(query, key, value, visible_BTS, operand_dtype=operand_dtype)
        return out, LayerCache(key, value)

    return attend


def decode_attend(pad_B: jax.Array, slot: jax.Array, *, operand_dtype: jnp.dtype) -> Attend:
    """Attention of one new token per row over the cache, into which it is written first.

    Args:
        pad_B: int32; slots before a row's first prompt token.
        slot: int32 scalar; where the new token lies in every row.
    """

    def attend(query_B1NH, key_B1KH, value_B1KH, cache: LayerCache):
        write = jax.lax.dynamic_update_slice_in_dim
        cache = LayerCache(
            write(cache.key_BSKH, key_B1KH.astype(cache.key_BSKH.dtype), slot, axis=1),
            write(cache.value_BSKH, value_B1KH.astype(cache.value_BSKH.dtype), slot, axis=1),
        )
        slot_S = jnp.arange(cache.key_BSKH.shape[1])
        visible_B1S = (slot_S >= pad_B[:, None, None]) & (slot_S <= slot)
        out = attention(
            query_B1NH, cache.key_BSKH, cache.value_BSKH, visible_B1S, operand_dtype=operand_dtype
        )
        return out, cache

    return attend


def grow_and_fork(cache: list[LayerCache], S: int, copies: int) -> list[LayerCache]:
    """Gives every prompt `copies` rows (adjacent) and room for S slots."""

    def one(leaf_PTKH):
        room = S - leaf_PTKH.shape[1]
        grown = jnp.pad(leaf_PTKH, ((0, 0), (0, room), (0, 0), (0, 0)))
        return jnp.repeat(grown, copies, axis=0)

    return jax.tree.map(one, cache)
