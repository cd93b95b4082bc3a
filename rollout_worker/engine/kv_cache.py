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
    R: columns of a row with room for a chunk behind them
    H: head size
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.choose import REFERENCE
from kernels.decode_attention.ops import decode_attention
from kernels.packed_attention.ops import AttentionPlan, packed_attention
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


def first_attend(
    entry_Q: jax.Array,
    *,
    operand_dtype: jnp.dtype,
    plan: AttentionPlan,
    heads_axis: str | None = None,
    mesh: Mesh | None = None,
) -> Attend:
    """Causal attention of the first chunk of every prompt, kept in the prefix pool.

    Args:
        entry_Q: int32; row of the pool for each prompt. An entry past the pool's end writes
            nothing: calls have a fixed number of prompts, and this marks the unused ones.
        plan: for rows of a chunk's length.
        heads_axis, mesh: as `decode_attention` takes them.
    """

    def attend(query_QCNH, key_QCKH, value_QCKH, layer: LayerCache):
        Q, C = query_QCNH.shape[:2]
        arrays = (query_QCNH, key_QCKH, value_QCKH)
        impl = plan.impl_for(C)
        if impl == REFERENCE:
            causal_CC = jnp.tril(jnp.ones((C, C), bool))
            out = attention(*arrays, causal_CC[None], operand_dtype=operand_dtype)
        else:
            heads = P(None, None, heads_axis)
            op = partial(packed_attention, operand_dtype=operand_dtype, impl=impl)
            op = _over_heads(op, (heads, heads, heads, P()), heads, heads_axis, mesh)
            out = op(*arrays, jnp.ones((Q, C), jnp.int32))

        def keep(pool_BKSH, new_QCKH):
            columns = min(C, pool_BKSH.shape[2])
            new_QKSH = new_QCKH.swapaxes(1, 2)[:, :, :columns].astype(pool_BKSH.dtype)
            return pool_BKSH.at[entry_Q, :, :columns].set(new_QKSH, mode="drop")

        return out, LayerCache(keep(layer.key_BKSH, key_QCKH), keep(layer.value_BKSH, value_QCKH))

    return attend


def next_attend(
    entry_Q: jax.Array,
    start_Q: jax.Array,
    *,
    operand_dtype: jnp.dtype,
    plan: AttentionPlan,
    heads_axis: str | None = None,
    mesh: Mesh | None = None,
) -> Attend:
    """Attention of a later chunk over the columns of its prompt in the pool, and over itself.

    What the pool holds from a chunk's start on does not matter, and need not be finite.

    Args:
        entry_Q, heads_axis, mesh: as in `first_attend`.
        start_Q: int32; position of each chunk's first token.
        plan: for rows of the pool's width.
    """

    def attend(query_QCNH, key_QCKH, value_QCKH, layer: LayerCache):
        C, S = query_QCNH.shape[1], layer.key_BKSH.shape[2]
        arrays = (query_QCNH, key_QCKH, value_QCKH, layer, entry_Q, start_Q)
        if plan.impl_for(S) == REFERENCE:
            return _attend_whole(*arrays, operand_dtype=operand_dtype)
        op = partial(_attend_in_turn, operand_dtype=operand_dtype, impl=plan.impl_for(S, C))
        heads, columns = P(None, None, heads_axis), P(None, heads_axis)
        given = (heads, heads, heads, columns, P(), P())
        return _over_heads(op, given, (heads, columns), heads_axis, mesh)(*arrays)

    return attend


def _attend_whole(
    query_QCNH, key_QCKH, value_QCKH, layer: LayerCache, entry_Q, start_Q, *, operand_dtype
) -> tuple[jax.Array, LayerCache]:
    """Later chunks of all prompts at once, with whole scores against all columns."""
    C, S = query_QCNH.shape[1], layer.key_BKSH.shape[2]
    place_QC = start_Q[:, None] + jnp.arange(C)
    visible_QCS = jnp.arange(S) <= place_QC[..., None]

    def written(pool_BKSH, new_QCKH):
        rows_QKSH = pool_BKSH.at[entry_Q].get(mode="clip")
        return jax.vmap(_with_chunk)(rows_QKSH, new_QCKH, start_Q)[:, :, :S]

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


def _attend_in_turn(
    query_QCNH, key_QCKH, value_QCKH, layer: LayerCache, entry_Q, start_Q, *, operand_dtype, impl
) -> tuple[jax.Array, LayerCache]:
    """Later chunks one prompt after the other, so that one row of the pool is copied at a time.

    The number of turns is not known to the compiler, which would else unroll a single one, and read
    the rows of many layers before it needs them.
    """
    C, (B, _, S, _) = query_QCNH.shape[1], layer.key_BKSH.shape

    def one(q, carry: tuple[jax.Array, LayerCache]):
        out_QCNH, layer = carry
        entry, start = entry_Q[q], start_Q[q]

        def written(pool_BKSH, new_QCKH):
            return _with_chunk(pool_BKSH.at[entry].get(mode="clip"), new_QCKH[q], start)

        key_KRH = written(layer.key_BKSH, key_QCKH)
        value_KRH = written(layer.value_BKSH, value_QCKH)
        out_1CNH = packed_attention(
            query_QCNH[q][None],
            key_KRH.swapaxes(0, 1)[None],
            value_KRH.swapaxes(0, 1)[None],
            (jnp.arange(S + C) < start + C).astype(jnp.int32)[None],
            operand_dtype=operand_dtype,
            start_C=start[None],
            impl=impl,
        )
        layer = LayerCache(
            layer.key_BKSH.at[entry].set(key_KRH[:, :S], mode="drop"),
            layer.value_BKSH.at[entry].set(value_KRH[:, :S], mode="drop"),
        )
        return out_QCNH.at[q].set(out_1CNH[0]), layer

    turns = jnp.max(jnp.where(entry_Q < B, jnp.arange(1, len(entry_Q) + 1), 0))
    return jax.lax.fori_loop(0, turns, one, (jnp.zeros_like(query_QCNH), layer))


def _with_chunk(row_KSH: jax.Array, new_CKH: jax.Array, start: jax.Array) -> jax.Array:
    """A row up to a chunk's start, then the chunk, then zeros: [K, S + C, H] in the row's dtype.

    XLA moves an update that does not fit back to where it does, over earlier columns. The padding
    of a last chunk may reach past the end, so that there is room for it.
    """
    C, S = new_CKH.shape[0], row_KSH.shape[1]
    before_S1 = (jnp.arange(S) < start)[:, None]
    room_KRH = jnp.pad(jnp.where(before_S1, row_KSH, 0), ((0, 0), (0, C), (0, 0)))
    new_KCH = new_CKH.swapaxes(0, 1).astype(row_KSH.dtype)
    return jax.lax.dynamic_update_slice(room_KRH, new_KCH, (0, start, 0))


def _over_heads(function, in_specs, out_specs, heads_axis: str | None, mesh: Mesh | None):
    """`function` of this device's heads: the compiler does not cut a TPU kernel by itself."""
    if heads_axis is None:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={heads_axis} if mesh is None else set(mesh.axis_names),
        check_vma=False,  # a Pallas call says nothing of what varies over which axis
    )


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
