"""Which blocks of a packed row have to do with which: what lets a kernel skip the others.

A row is cut into blocks of equally many tokens. A block of queries needs those blocks of keys that
hold a token of one of its segments, not behind it, and not before its window. Ranges are taken from
the smallest and largest segment of a block. Where segments are numbered along the row, as packing
numbers them, no range has a block too many; for other numbers it may, and never one too few.

Dimension key:
    B: rows
    Q: blocks of queries
    J: blocks of a row, as keys
    L: tokens of a block
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class QueryBlocks(NamedTuple):
    """Blocks of queries of the row, in its order."""

    segment_BQL: jax.Array
    """int32; 0 is padding, which needs nothing."""
    start_Q: jax.Array
    """int32; the place of the first token of each in the row."""


class BlockRange(NamedTuple):
    """For every block, those of the other side that it needs; int32 [B, Q] or [B, J] each."""

    first: jax.Array
    stop: jax.Array
    """The block behind the last; where none is needed, both are the same."""


class BlockRanges(NamedTuple):
    """Both sides."""

    keys: BlockRange
    """Of each block of queries."""
    queries: BlockRange
    """Of each block of keys."""


def block_ranges(
    segment_BJL: jax.Array, queries: QueryBlocks | None = None, *, window: int | None = None
) -> BlockRanges:
    """The ranges of rows that are cut into blocks.

    Args:
        segment_BJL: int32; 0 is padding, which needs nothing.
        queries: None for the blocks of the row.
    """
    _, J, L = segment_BJL.shape
    key_start_J = jnp.arange(J) * L
    if queries is None:
        queries = QueryBlocks(segment_BJL, key_start_J)
    last_Q = queries.start_Q + queries.segment_BQL.shape[-1] - 1
    near_QJ = last_Q[:, None] >= key_start_J
    if window is not None:
        near_QJ &= queries.start_Q[:, None] - (key_start_J + L - 1) < window
    low_BQ, high_BQ = _bounds(queries.segment_BQL)
    low_BJ, high_BJ = _bounds(segment_BJL)
    meet_BQJ = near_QJ & (low_BQ[:, :, None] <= high_BJ[:, None, :])
    meet_BQJ &= low_BJ[:, None, :] <= high_BQ[:, :, None]
    return BlockRanges(_range(meet_BQJ), _range(meet_BQJ.swapaxes(1, 2)))


def _bounds(segment_BJL):
    """The smallest and the largest segment of each block [B, J]."""
    bounds = jnp.iinfo(segment_BJL.dtype)
    is_token_BJL = segment_BJL != 0
    low_BJ = jnp.where(is_token_BJL, segment_BJL, bounds.max).min(axis=-1)
    return low_BJ, jnp.where(is_token_BJL, segment_BJL, bounds.min).max(axis=-1)


def _range(meet_BQJ):
    J = meet_BQJ.shape[-1]
    first_BQ = jnp.argmax(meet_BQJ, axis=-1).astype(jnp.int32)
    stop_BQ = J - jnp.argmax(meet_BQJ[..., ::-1], axis=-1).astype(jnp.int32)
    return BlockRange(first_BQ, jnp.where(meet_BQJ.any(axis=-1), stop_BQ, first_BQ))
