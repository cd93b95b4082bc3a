"""Keys and values of the tokens so far: two buffers per layer, with a column per position.

There are two sets of buffers: the cache, with a row per slot, and the prefix pool, with a row per
prefilled prompt or parked episode. Column and position are the same number in every row, so nothing
is padded on the left: which columns a row may attend to follows from its length alone, and what an
earlier row left in later columns is masked. A program attends over the whole width of the buffer
that it is given, masked columns included; so the cache exists in a few widths, and a wider one is
made when a row needs it.

Dimension key:
    B: rows of a buffer (slots of the cache, or entries of the prefix pool)
    Q: prompts of a prefill call
    C: tokens of a prefill chunk
    N: query heads
    K: key/value heads
    S: columns
    H: head size
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.decode_attention.ops import decode_attention
from models.attention import attention
from models.transformer import Attend

NARROWEST = 256
"""Columns of the smallest cache: below it, attention is a small part of a token step."""


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    key_BKSH: jax.Array
    value_BKSH: jax.Array


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


def doubling_sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """Sizes that double from about `smallest` up to exactly `largest`."""
    sizes = [largest]
    while sizes[0] > 1.5 * smallest:
        sizes.insert(0, max(sizes[0] // 2, smallest))
    return tuple(sizes)


def allocate_cache(
    layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> list[LayerCache]:
    """Zeros [B, K, S, H] for every layer: masked columns must be finite, and these are."""
    return [LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers)]


def resize(cache: list[LayerCache], *, width: int) -> list[LayerCache]:
    """The same columns in buffers of another width; columns that do not fit are dropped."""

    def one(leaf_BKSH):
        missing = width - leaf_BKSH.shape[2]
        if missing <= 0:
            return leaf_BKSH[:, :, :width]
        return jnp.pad(leaf_BKSH, ((0, 0), (0, 0), (0, missing), (0, 0)))

    return jax.tree.map(one, cache)


def copy_prefixes(
    pool: list[LayerCache], cache: list[LayerCache], take_B: jax.Array, prefix_B: jax.Array
) -> list[LayerCache]:
    """Copies prefixes from the pool into the slots that a row enters, in place.

    Args:
        take_B: bool; the slots that a row enters.
        prefix_B: int32; the pool's entry for each of these.
    """
    return _copy_rows(pool, cache, take_B, lambda slot: (prefix_B[slot], slot))


def park_rows(
    cache: list[LayerCache], pool: list[LayerCache], ended_B: jax.Array, entry_B: jax.Array
) -> list[LayerCache]:
    """Copies slots whose row has ended into the pool, in place.

    Args:
        ended_B: bool; the slots to copy.
        entry_B: int32; the pool's entry for each of these.
    """
    return _copy_rows(cache, pool, ended_B, lambda slot: (slot, entry_B[slot]))


def _copy_rows(
    source: list[LayerCache],
    target: list[LayerCache],
    chosen_B: jax.Array,
    rows_of: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> list[LayerCache]:
    """Copies one row for every chosen slot, as far as both buffers have columns.

    A loop over these slots, most often none or one. A `where` over all slots would read and write
    the whole cache in every token step.

    Args:
        rows_of: of a slot, its row of the source and of the target.
    """
    columns = min(source[0].key_BKSH.shape[2], target[0].key_BKSH.shape[2])

    def copy(left_and_target):
        left_B, target = left_and_target
        slot = jnp.argmax(left_B)
        source_row, target_row = rows_of(slot)

        def one(target_BKSH, source_BKSH):
            size = (1, source_BKSH.shape[1], columns, source_BKSH.shape[3])
            row = jax.lax.dynamic_slice(source_BKSH, (source_row, 0, 0, 0), size)
            return jax.lax.dynamic_update_slice(target_BKSH, row, (target_row, 0, 0, 0))

        return left_B.at[slot].set(False), jax.tree.map(one, target, source)

    return jax.lax.while_loop(lambda carry: jnp.any(carry[0]), copy, (chosen_B, target))[1]


def first_attend(entry_Q: jax.Array, *, operand_dtype: jnp.dtype) -> Attend:
    """Causal attention of the first chunk of every prompt, kept in the prefix pool.

    Args:
        entry_Q: int32; row of the pool for each prompt. An entry past the pool's end writes
            nothing: calls have a fixed number of prompts, and this marks the unused ones.
    """

    def attend(query_QCNH, key_QCKH, value_QCKH, layer: LayerCache):
        C = query_QCNH.shape[1]
        causal_CC = jnp.tril(jnp.ones((C, C), bool))
        out = attention(
            query_QCNH, key_QCKH, value_QCKH, causal_CC[None], operand_dtype=operand_dtype
        )

        def keep(pool_BKSH, new_QCKH):
            columns = min(C, pool_BKSH.shape[2])
            new_QKSH = new_QCKH.swapaxes(1, 2)[:, :, :columns].astype(pool_BKSH.dtype)
            return pool_BKSH.at[entry_Q, :, :columns].set(new_QKSH, mode="drop")

        return out, LayerCache(keep(layer.key_BKSH, key_QCKH), keep(layer.value_BKSH, value_QCKH))

    return attend


def next_attend(entry_Q: jax.Array, start_Q: jax.Array, *, operand_dtype: jnp.dtype) -> Attend:
    """Attention of a later chunk over the columns of its prompt in the pool, and over itself.

    Args:
        entry_Q: as in `first_attend`.
        start_Q: int32; position of each chunk's first token.
    """

    def attend(query_QCNH, key_QCKH, value_QCKH, layer: LayerCache):
        C, S = query_QCNH.shape[1], layer.key_BKSH.shape[2]
        column_S = jnp.arange(S)
        place_QC = start_Q[:, None] + jnp.arange(C)
        visible_QCS = column_S <= place_QC[..., None]

        def written(pool_BKSH, new_QCKH):
            def one(row_KSH, new_KCH, start):
                # XLA moves an update that does not fit back to where it does, over earlier
                # columns. The padding of a last chunk may reach past the end: give it room.
                room = jnp.pad(row_KSH, ((0, 0), (0, C), (0, 0)))
                return jax.lax.dynamic_update_slice(room, new_KCH, (0, start, 0))[:, :S]

            rows = pool_BKSH.at[entry_Q].get(mode="clip")
            return jax.vmap(one)(rows, new_QCKH.swapaxes(1, 2).astype(rows.dtype), start_Q)

        key_QKSH = written(layer.key_BKSH, key_QCKH)
        value_QKSH = written(layer.value_BKSH, value_QCKH)
        out = attention(
            query_QCNH,
            key_QKSH.swapaxes(1, 2),
            value_QKSH.swapaxes(1, 2),
            visible_QCS,
            operand_dtype=operand_dtype,
        )
        return out, LayerCache(
            layer.key_BKSH.at[entry_Q].set(key_QKSH, mode="drop"),
            layer.value_BKSH.at[entry_Q].set(value_QKSH, mode="drop"),
        )

    return attend


def decode_attend(position_B: jax.Array, **how) -> Attend:
    """Attention of one new token per row over its cache, into which it is written first.

    Args:
        position_B: int32; position of each row's new token.
        how: implementation, operand dtype and mesh, as `decode_attention` takes them.
    """
    op = partial(decode_attention, **how)

    def attend(query_B1NH, key_B1KH, value_B1KH, layer: LayerCache):
        out_BNH, key_BKSH, value_BKSH = op(
            query_B1NH[:, 0], key_B1KH[:, 0], value_B1KH[:, 0], *layer, position_B
        )
        return out_BNH[:, None], LayerCache(key_BKSH, value_BKSH)

    return attend
