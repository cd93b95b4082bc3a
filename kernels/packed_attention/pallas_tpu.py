"""`packed_attention` by jax's splash attention, which is given the blocks that the segments need.

Splash attention takes a list of blocks to visit, made from a mask that is known when a program is
compiled. Segments are not, and what it offers for masks that are not holds the whole mask in
memory. Its list is made here from the ranges of block_ranges.py: for each block of queries, the
blocks of keys in turn, and the last one again, which is not fetched anew, until the grid ends.
The kernel itself compares the segments within a block. A block that is not visited still costs a
step of the grid, so that blocks are large.

Every block of queries visits at least the keys in the place of its first: a block without a visit
would divide by zero. So padding is attended in its own block alone, as one more segment. What a
chunk of queries lacks to whole blocks is filled with its last token again, whose results are
dropped.

The backward pass has one kernel for queries and one for keys and values: the fused one holds a
gradient of the queries for every block of keys, which grows with the square of T.

Queries that are chunks of a row are one call: the kernel gets the place of each in the row.

Dimension key: that of xla.py, and
    W: visits of a block of queries, or of keys
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from kernels.packed_attention.block_ranges import BlockRange, QueryBlocks, block_ranges
from kernels.packed_attention.reference import KEPT_NAME, MASKED_SCORE, query_places

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
    key_BRKH: jax.Array,
    value_BRKH: jax.Array,
    segment_BR: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    window: int | None = None,
    soft_cap: float | None = None,
    start_C: jax.Array | None = None,
    block_tokens: int = BLOCK_TOKENS,
    interpret: bool = False,
) -> jax.Array:
    """Same contract as reference.packed_attention.

    The scaled queries are rounded to operand_dtype as well, and of the softmax weights those of the
    backward pass alone.

    Args:
        block_tokens: at most; a multiple of LANES.
    """
    B, T, N, H = query_BTNH.shape
    chunks = 1 if start_C is None else len(start_C)
    L = even_block(T // chunks, block_tokens)
    segment_BR = segment_BR.astype(jnp.int32)
    place_T, segment_BT = query_places(segment_BR, start_C, T)
    filled = functools.partial(_filled_chunks, chunks=chunks, L=L)
    keys = lambda array: _filled(array.astype(operand_dtype), L).swapaxes(1, 2)
    scaled_BTNH = (query_BTNH.astype(jnp.float32) * H**-0.5).astype(operand_dtype)
    arrays = (
        filled(scaled_BTNH).swapaxes(1, 2),
        keys(key_BRKH),
        keys(value_BRKH),
        filled(segment_BT),
        _filled(segment_BR, L),
    )
    one_row = functools.partial(
        _attend_row,
        place_T=filled(place_T[None])[0],
        exact=jnp.dtype(operand_dtype) == jnp.float32,
        window=window,
        soft_cap=soft_cap,
        # Beside those of a row in blocks: one for a border within a block, one for each chunk.
        more_visits=0 if start_C is None else 1 + chunks,
        L=L,
        interpret=interpret,
    )
    if B == 1:
        out_BNTH = one_row([array[0] for array in arrays])[None]
    else:
        out_BNTH = jax.lax.map(one_row, arrays)
    out_BTNH = out_BNTH.swapaxes(1, 2).reshape(B, chunks, -1, N, H)
    out_BTNH = out_BTNH[:, :, : T // chunks].reshape(query_BTNH.shape)
    return jnp.where(segment_BT[..., None, None] != 0, out_BTNH, 0).astype(query_BTNH.dtype)


def even_block(T: int, at_most: int) -> int:
    """Tokens of each block of T, evened out over as few blocks as the bound allows."""
    blocks = -(-T // at_most)
    return -(-T // blocks // LANES) * LANES


def _filled(array_BR, L, mode="constant"):
    """Tokens filled up to whole blocks, with zeros, or with the last one (`edge`)."""
    widths = [(0, 0)] * array_BR.ndim
    widths[1] = (0, -array_BR.shape[1] % L)
    return jnp.pad(array_BR, widths, mode=mode)


def _filled_chunks(array_BT, *, chunks, L):
    """Each chunk of the tokens filled up with its last one."""
    B, T, *rest = array_BT.shape
    filled = _filled(array_BT.reshape(B * chunks, T // chunks, *rest), L, mode="edge")
    return filled.reshape(B, -1, *rest)


def _attend_row(arrays, *, place_T, exact, window, soft_cap, more_visits, L, interpret) -> Any:
    """[N, T, H] of one row, all in whole blocks."""
    query_NTH, key_KRH, value_KRH, segment_T, segment_R = arrays
    Q, J = len(segment_T) // L, len(segment_R) // L
    place_QL = place_T.reshape(Q, L)
    blocks = QueryBlocks(segment_T.reshape(1, Q, L), place_QL[:, 0])
    keys, queries = block_ranges(segment_R.reshape(1, J, L), blocks, window=window)
    # At most so many blocks of one side meet a block of the other; without a window all may.
    most = max(Q, J) if window is None else -(-(window - 1) // L) + 1 + more_visits
    of_queries = _visits(keys, place_QL[:, 0] // L, min(J, most))
    visit_JW, is_visited_JW = _visits(queries, jnp.zeros(J, jnp.int32), min(Q, most))
    rows = _mask_info(*of_queries, place_T)
    columns = _mask_info(visit_JW.T, is_visited_JW.T, place_T)
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
        residual_checkpoint_name=KEPT_NAME,
        mask_function=_Seen(window),
        interpret=interpret,
    )
    segments = splash.SegmentIds(segment_T, segment_R)
    return _with_precision(exact, kernel, query_NTH, key_KRH, value_KRH, segments)


def _visits(found: BlockRange, own_Q, most):
    """Blocks to visit in turn, int32 [Q, W], and whether each is one or repeats the last.

    Args:
        found: of one row, [1, Q].
        own_Q: visited where nothing else is.
    """
    first_Q, stop_Q = found.first[0], found.stop[0]
    count_Q = jnp.maximum(stop_Q - first_Q, 1)
    first_Q = jnp.where(stop_Q > first_Q, first_Q, own_Q)
    turn_W = jnp.arange(most, dtype=jnp.int32)
    visit_QW = first_Q[:, None] + jnp.minimum(turn_W, count_Q[:, None] - 1)
    return visit_QW, (turn_W < count_Q[:, None]).astype(jnp.int32)


def _mask_info(visit, is_visited, place_T) -> MaskInfo:
    return MaskInfo(
        data_next=visit[None],
        mask_next=None,
        block_mask=is_visited[None],
        partial_mask_blocks=None,
        q_sequence=place_T,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_precision(exact, kernel, query_NTH, key_KRH, value_KRH, segments):
    """The kernel, with products of float32 not rounded to bfloat16, in both passes."""
    with _precision(exact):
        return kernel(query_NTH, key_KRH, value_KRH, segments)


def _forward(exact, kernel, query_NTH, key_KRH, value_KRH, segments):
    run = lambda *arrays: kernel(*arrays, segments)
    with _precision(exact):
        return jax.vjp(run, query_NTH, key_KRH, value_KRH)


def _backward(exact, pull, d_out_NTH):
    with _precision(exact):
        return (None, *pull(d_out_NTH), None)


_with_precision.defvjp(_forward, _backward)


def _precision(exact):
    return jax.default_matmul_precision("highest" if exact else "default")
