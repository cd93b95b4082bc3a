"""Which blocks of a packed row have to do with which: what lets a kernel skip the others.

A row is cut into blocks of equally many tokens. A block of queries needs those blocks of keys that
hold a token of one of its segments, not behind it, and not before its window. Ranges are taken from
the smallest and largest segment of a block. Where segments are numbered along the row, as packing
numbers them, no range has a block too many; for other numbers it may, and never one too few.

Dimension key:
    B: rows
    J: blocks of a row
    L: tokens of a block
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class BlockRange(NamedTuple):
    """For every block, those of the other side that it needs; int32 [B, J] each."""

    first: jax.Array
    stop: jax.Array
    """The block behind the last; where none is needed, both are the same."""


class BlockRanges(NamedTuple):
    """Both sides."""

    keys: BlockRange
    """Of each block of queries."""
    queries: BlockRange
    """Of each block of keys."""


def block_ranges(segment_BJL: jax.Array, *, window: int | None = None) -> BlockRanges:
    """The ranges of rows that are cut into blocks.

    Args:
        segment_BJL: int32; 0 is padding, which needs nothing.
    """
    _, J, L = segment_BJL.shape
    bounds = jnp.iinfo(segment_BJL.dtype)
    is_token_BJL = segment_BJL != 0
    low_BJ = jnp.where(is_token_BJL, segment_BJL, bounds.max).min(axis=-1)
    high_BJ = jnp.where(is_token_BJL, segment_BJL, bounds.min).max(axis=-1)
    block_J = jnp.arange(J)
    behind_JJ = block_J[:, None] - block_J
    near_JJ = behind_JJ >= 0
    if window is not None:
        near_JJ &= (behind_JJ - 1) * L + 1 < window
    meet_BJJ = near_JJ & (low_BJ[:, :, None] <= high_BJ[:, None, :])
    meet_BJJ &= low_BJ[:, None, :] <= high_BJ[:, :, None]
    return BlockRanges(_range(meet_BJJ), _range(meet_BJJ.swapaxes(1, 2)))


def _range(meet_BJJ):
    J = meet_BJJ.shape[-1]
    first_BJ = jnp.argmax(meet_BJJ, axis=-1).astype(jnp.int32)
    stop_BJ = J - jnp.argmax(meet_BJJ[..., ::-1], axis=-1).astype(jnp.int32)
    return BlockRange(first_BJ, jnp.where(meet_BJJ.any(axis=-1), stop_BJ, first_BJ))
