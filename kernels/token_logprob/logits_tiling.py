"""How the TPU kernels of pallas_tpu.py see and cut logits [B, T, V] without moving them.

XLA chooses the order in which an array lies in HBM; `default_view` knows which it chooses. A kernel
gets the array in that order (a View: reshapes and transposes that move no byte), cut into tiles of
a few MB, which are the blocks of its grid. Each tile is walked in slabs: slices along the
vocabulary that fill a few registers.

Dimension key:
    B: sequences (all leading dimensions but the last)
    T: tokens
    V: columns of the logits, or the number of values per token of another array
    R: rows of 128 tokens, B * T / 128
"""

import dataclasses
import enum
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint

SUBLANES, LANES = 8, 128
TILE_BYTES = 4 << 20
"""Logits in a tile: the fixed cost of a grid step is then a few percent. VMEM holds up to four."""
MOST_UNROLL = 16
"""Slabs in the body of a loop, at most: a bound on code size."""
SLAB_PLACES = 8192
"""Eight float32 registers: so many independent sums hide the latency of an addition."""


class View(enum.Enum):
    """How [B, T, V] lies in memory, major to minor."""

    VOCAB_MINOR = "[B, T, V]"
    TIME_MINOR = "[B, V, T]"
    TIME_DENSE = "[V, R, 128]"
    """[V, B, T] in tiles of B x 128, whose bytes are those of whole registers when T % 128 == 0."""


def default_view(shape: tuple[int, int, int], dtype) -> View:
    """The order that XLA:TPU gives an argument [B, T, V]: the one with the least padding.

    The two minor axes are padded to whole tiles of 8 x 128. Fewer than 8 rows are padded to the
    next power of two, of at least 32 bits a column.
    """
    B, T, V = shape
    least = 4 // jnp.dtype(dtype).itemsize

    def padded(major, rows, columns):
        tile = min(SUBLANES, max(least, 1 << (rows - 1).bit_length()))
        return major * _round_up(rows, tile) * _round_up(columns, LANES)

    sizes = {View.VOCAB_MINOR: padded(B, T, V), View.TIME_MINOR: padded(B, V, T)}
    if T % LANES == 0:
        sizes[View.TIME_DENSE] = padded(V, B, T)
    return min(sizes, key=lambda view: sizes[view])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel walks a view of [B, T, V]; static."""

    view: View
    shape: tuple[int, int, int]
    """B, T, V; in VOCAB_MINOR all tokens count as one sequence where that moves nothing."""
    block_tokens: int
    """Per tile: tokens, or for TIME_DENSE rows of 128 tokens."""
    block_vocab: int
    slab: int
    """Columns of the vocabulary in a slab, a power of two."""
    unroll: int
    """Slabs in the body of a loop; slab * unroll divides block_vocab."""

    @property
    def slabs(self) -> int:
        """The number of slabs in a tile."""
        return self.block_vocab // self.slab

    @property
    def vocab_axis(self) -> int:
        """The axis of the vocabulary in a tile."""
        return 1 if self.view is View.VOCAB_MINOR else 0

    def tile(self, columns: int) -> tuple[int, ...]:
        """Shape of a slice of a tile with this number of columns, as the kernel sees it."""
        return {
            View.VOCAB_MINOR: (self.block_tokens, columns),
            View.TIME_MINOR: (columns, self.block_tokens),
            View.TIME_DENSE: (columns, self.block_tokens, LANES),
        }[self.view]

    def at(self, start, columns: int) -> tuple:
        """Index of these columns in a reference to a tile."""
        chosen = pl.ds(start, columns)
        return (slice(None), chosen) if self.vocab_axis else (chosen, ...)

    def array(self, columns: int) -> tuple[int, int, int]:
        """Shape of the view of [B, T, columns]."""
        B, T, _ = self.shape
        return {
            View.VOCAB_MINOR: (B, T, columns),
            View.TIME_MINOR: (B, columns, T),
            View.TIME_DENSE: (columns, B * T // LANES, LANES),
        }[self.view]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles over sequences, over tokens and, fastest, over the vocabulary."""
        B, T, V = self.shape
        if self.view is View.TIME_DENSE:
            B, T = 1, B * T // LANES
        return B, pl.cdiv(T, self.block_tokens), pl.cdiv(V, self.block_vocab)

    def spec(self, columns: int | None = None) -> pl.BlockSpec:
        """Block of the logits, or of an array with `columns` numbers per token.

        The block of such an array does not depend on the vocabulary index of the grid: it stays in
        VMEM while the vocabulary is walked, and an output is copied to HBM once after it.
        """

        def place(b, t, v, _):
            v = v if columns is None else 0
            return {
                View.VOCAB_MINOR: (b, t, v),
                View.TIME_MINOR: (b, v, t),
                View.TIME_DENSE: (v, t, 0),
            }[self.view]

        tile = self.tile(columns or self.block_vocab)
        return pl.BlockSpec(tile if len(tile) == 3 else (None, *tile), place)

    def view_of(self, array_BTV: jax.Array) -> jax.Array:
        """The view of an array: the same bytes where the array lies in that order, else a copy."""
        B, T, V = array_BTV.shape
        if self.view is View.VOCAB_MINOR:
            return array_BTV.reshape(self.array(V))
        if self.view is View.TIME_MINOR:
            return array_BTV.transpose(0, 2, 1)
        array_VBT = array_BTV.transpose(2, 0, 1)
        if B > 1:
            array_VBT = array_VBT.reshape(V, B, T // LANES, LANES).transpose(0, 2, 1, 3)
        return array_VBT.reshape(self.array(V))

    def array_of(self, array: jax.Array) -> jax.Array:
        """[B, T, V], with the B and T of `shape`, from its view."""
        B, T, _ = self.shape
        if self.view is View.VOCAB_MINOR:
            return array
        if self.view is View.TIME_MINOR:
            return array.transpose(0, 2, 1)
        V = array.shape[0]
        if B == 1:
            # Without the constraint XLA chooses another layout for this reshape, and copies twice.
            array_VBT = with_layout_constraint(array.reshape(V, 1, T), Layout((0, 1, 2)))
        else:
            array = array.reshape(V, T // LANES, B, LANES).transpose(0, 2, 1, 3)
            array_VBT = array.reshape(V, B, T)
        return array_VBT.transpose(1, 2, 0)


def _floor_power_of_two(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)


def _unroll(slabs: int) -> int:
    """Slabs in the body of the loop: the best if a round costs half a slab beside its slabs."""
    most = min(slabs, MOST_UNROLL)
    return min(
        range(most, most // 2, -1), key=lambda unroll: pl.cdiv(slabs, unroll) * (unroll + 0.5)
    )


def make_tiling(
    logits_BTV: jax.Array,
    minor: Literal["vocab", "time"] | None,
    block_tokens: int | None,
    block_vocab: int | None,
) -> Tiling:
    """Tiles of TILE_BYTES in slabs of SLAB_PLACES, or about the sizes that are given.

    Args:
        minor: the axis in which the logits are contiguous; None asks `default_view`.
        block_tokens: tokens of a tile, in the dense view rows of 128 tokens.
        block_vocab: most columns of a tile; then evened out over the tiles, in whole slabs.
    """
    B, T, V = logits_BTV.shape
    view = default_view((B, T, V), logits_BTV.dtype)
    if minor == "vocab":
        view = View.VOCAB_MINOR
    elif minor == "time" and view is View.VOCAB_MINOR:
        view = View.TIME_MINOR
    if view is View.VOCAB_MINOR and T % SUBLANES == 0:
        B, T = 1, B * T
    tokens, most, unit, lanes = {
        View.VOCAB_MINOR: (T, 32, 2 * LANES, 1),
        View.TIME_MINOR: (T, 512, 16, 1),
        View.TIME_DENSE: (B * T // LANES, 32, 1, LANES),
    }[view]
    block_tokens = min(tokens, block_tokens or most)
    lanes_taken = _round_up(block_tokens, LANES) if view is View.TIME_MINOR else block_tokens
    tile_column_bytes = lanes_taken * lanes * logits_BTV.dtype.itemsize
    most_vocab = min(block_vocab or max(TILE_BYTES // tile_column_bytes, 1), V)
    most_slab = min(SLAB_PLACES // (block_tokens * lanes), most_vocab)
    slab = unit * _floor_power_of_two(most_slab // unit)
    even_vocab = pl.cdiv(V, pl.cdiv(V, most_vocab))
    slabs = pl.cdiv(even_vocab, slab)
    unroll = _unroll(slabs)
    return Tiling(view, (B, T, V), block_tokens, _round_up(even_vocab, slab * unroll), slab, unroll)
