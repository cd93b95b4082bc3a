"""`packed_attention` by jax's splash attention, which is given the blocks that the segments need.

Splash attention takes a list of blocks to visit, made from a mask that is known when a program is
compiled. Segments are not, and what it offers for masks that are not holds the whole mask in
memory. Its list is made here from the ranges of block_ranges.py: for each block of queries, the
blocks of keys in turn, and the last one again, which is not fetched anew, until the grid ends.
The kernel itself compares the segments within a block. A block that is not visited still costs a
step of the grid, so that blocks are large.

Every block of queries visits at least the keys in its own places: a row without a visible key would
divide by zero. So padding is attended in its own block alone, as one more segment.

The backward pass has one kernel for queries and one for keys and values: the fused one holds a
gradient of the queries for every block of keys, which grows with the square of T.

Dimension key: that of xla.py, and
    I: visits of a block of queries, or of keys
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from kernels.packed_attention.block_ranges import BlockRange, block_ranges
from kernels.packed_attention.reference import MASKED_SCORE

LANES = 128
"""Blocks are multiples of the width of a vector register."""
BLOCK_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Which key places a query place may see; equal ones are one program."""

    window: int | None

    def __call__(self, query_place, key_place):
        seen = query_place >= key_place
        if self.window is not None:
            seen &= query_place - key_place < self.window
        return seen


def packed_attention(
    query_BTNH: jax.Array,
    key_BTKH: jax.Array,
    value_BTKH: jax.Array,
    segment_BT: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    window: int | None = None,
    soft_cap: float | None = None,
    block_tokens: int = BLOCK_TOKENS,
    interpret: bool = False,
) -> jax.Array:
    """Same contract as reference.packed_attention.

    The scaled queries are rounded to operand_dtype as well, and of the softmax weights those of the
    backward pass alone.

    Args:
        block_tokens: at most; a multiple of LANES.
    """
    T, H = query_BTNH.shape[1], query_BTNH.shape[-1]
    L = even_block(T, block_tokens)
    heads_first = lambda array: _padded(array.astype(operand_dtype).swapaxes(1, 2), L, axis=2)
    query_BNTH = heads_first(query_BTNH.astype(jnp.float32) * H**-0.5)
    segments_BT = _padded(segment_BT.astype(jnp.int32), L, axis=1)
    arrays = (query_BNTH, heads_first(key_BTKH), heads_first(value_BTKH), segments_BT)
    one_row = functools.partial(
        _attend_row,
        exact=jnp.dtype(operand_dtype) == jnp.float32,
        window=window,
        soft_cap=soft_cap,
        L=L,
        interpret=interpret,
    )
    if len(segment_BT) == 1:
        out_BNTH = one_row([array[0] for array in arrays])[None]
    else:
        out_BNTH = jax.lax.map(one_row, arrays)
    out_BTNH = out_BNTH.swapaxes(1, 2)[:, :T]
    return jnp.where(segment_BT[..., None, None] != 0, out_BTNH, 0).astype(query_BTNH.dtype)


def even_block(T: int, at_most: int) -> int:
    """Tokens of each block of T, evened out over as few blocks as the bound allows."""
    blocks = -(-T // at_most)
    return -(-T // blocks // LANES) * LANES


def _padded(array, L, *, axis):
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % L)
    return jnp.pad(array, widths)


def _attend_row(arrays, *, exact, window, soft_cap, L, interpret) -> Any:
    """[N, T, H] of one row."""
    query_NTH, key_KTH, value_KTH, segment_T = arrays
    J = len(segment_T) // L
    keys, queries = block_ranges(segment_T.reshape(1, J, L), window=window)
    block_J = jnp.arange(J, dtype=jnp.int32)
    # At most so many blocks of one side meet a block of the other.
    most = J if window is None else min(J, -(-(window - 1) // L) + 1)
    of_queries = _visits(BlockRange(keys.first[0], keys.stop[0]), block_J, most)
    of_keys = _visits(BlockRange(queries.first[0], queries.stop[0]), block_J, most)
    place_T = jnp.arange(len(segment_T), dtype=jnp.int32)
    rows = _mask_info(*of_queries, place_T)
    visit_JI, is_visited_JI = of_keys
    columns = _mask_info(visit_JI.T, is_visited_JI.T, place_T)
    kernel = splash.SplashAttentionKernel(
        rows,
        rows,
        columns,
        block_sizes=splash.BlockSizes(
            block_q=L,
            block_kv=L,
            block_q_dkv=L,
            block_kv_dkv=L,
            block_q_dq=L,
            block_kv_dq=L,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=MASKED_SCORE,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=None,
        mask_function=_Seen(window),
        interpret=interpret,
    )
    segments = splash.SegmentIds(segment_T, segment_T)
    return _with_precision(exact, kernel, query_NTH, key_KTH, value_KTH, segments)


def _visits(found: BlockRange, own_J, most):
    """Blocks to visit in turn, int32 [J, I], and whether each is one or repeats the last.

    Args:
        own_J: visited where nothing else is.
    """
    count_J = jnp.maximum(found.stop - found.first, 1)
    first_J = jnp.where(found.stop > found.first, found.first, own_J)
    turn_I = jnp.arange(most, dtype=jnp.int32)
    visit_JI = first_J[:, None] + jnp.minimum(turn_I, count_J[:, None] - 1)
    return visit_JI, (turn_I < count_J[:, None]).astype(jnp.int32)


def _mask_info(visit, is_visited, place_T) -> MaskInfo:
    return MaskInfo(
        data_next=visit[None],
        mask_next=None,
        block_mask=is_visited[None],
        partial_mask_blocks=None,
        q_sequence=place_T,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_precision(exact, kernel, query_NTH, key_KTH, value_KTH, segments):
    """The kernel, with products of float32 not rounded to bfloat16, in both passes."""
    with _precision(exact):
        return kernel(query_NTH, key_KTH, value_KTH, segments)


def _forward(exact, kernel, query_NTH, key_KTH, value_KTH, segments):
    run = lambda *arrays: kernel(*arrays, segments)
    with _precision(exact):
        return jax.vjp(run, query_NTH, key_KTH, value_KTH)


def _backward(exact, pull, d_out_NTH):
    with _precision(exact):
        return (None, *pull(d_out_NTH), None)


_with_precision.defvjp(_forward, _backward)


def _precision(exact):
    return jax.default_matmul_precision("highest" if exact else "default")
