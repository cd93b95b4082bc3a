"""What rows that begin alike do together inside the TPU kernel of pallas_tpu.py.

The columns that a group of rows shares are read once, from the leader's row, for ROWS of them at a
time: their queries stand side by side and make one product with each block. What that leaves of
their softmax, the blocks of each row alone go on from.

The rows that share stand in the kernel's memory in the order of their groups, each at its place.
A block is worked on for as many places as ROWS, be there fewer rows of the group: those behind
belong to groups whose turn is still to come, which start anew.

Dimension key: that of reference.py, and
    M: pieces, as many as there could be
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.decode_attention.xla import HIDDEN_SCORE, precision_of

ROWS = 16
"""Of eight query heads to a key/value head each, which fill the lanes of a register."""
LEAST_ROWS = 3
"""What two would save, the rest of a group of pieces may cost."""
SUBLANES = 8


class Prefixes(NamedTuple):
    """Who shares what, in one token step."""

    first_B: jax.Array
    """int32: column where the row goes on alone; 0 where it shares nothing."""
    place_B: jax.Array
    """int32: of the row among those that share; behind all places where it does not."""
    count: jax.Array
    """int32 [1]: pieces that are shared."""
    row_M: jax.Array
    """int32: leader whose block the piece is. Behind the last piece stands that one again."""
    own_M: jax.Array
    """int32: column where the piece begins."""
    place_M: jax.Array
    """int32: of the first row that the piece is for."""


def find(position_B, leader_B, shared_B, *, tile: int, block_S: int, most: int) -> Prefixes:
    """Shared pieces in the order of their places.

    Args:
        position_B, leader_B, shared_B: as ops.decode_attention takes them.
        tile: columns whose multiples a block may begin at.
        block_S: columns of a piece.
        most: M, from `most_pieces`, or more.
    """
    B = leader_B.shape[0]
    leader_B = jnp.clip(leader_B.astype(jnp.int32), 0, B - 1)
    shared_B = jnp.clip(shared_B.astype(jnp.int32), 0, position_B)
    row_B = jnp.arange(B)
    alike_BB = leader_B[:, None] == leader_B
    earlier_BB = alike_BB & (row_B[:, None] > row_B)
    first_B = jnp.where(alike_BB.sum(axis=1) >= LEAST_ROWS, shared_B // tile * tile, 0)
    before_BB = (first_B > 0) & ((leader_B[:, None] > leader_B) | earlier_BB)
    place_B = before_BB.sum(axis=1, dtype=jnp.int32)
    begins_B = earlier_BB.sum(axis=1) % ROWS == 0  # the first of up to ROWS rows
    pieces_B = jnp.where(begins_B, pl.cdiv(first_B, block_S), 0)
    start_B = jnp.where(before_BB, pieces_B, 0).sum(axis=1)
    count = pieces_B.sum(keepdims=True, dtype=jnp.int32)
    number_M = jnp.minimum(jnp.arange(most, dtype=jnp.int32), count - 1)[:, None]
    here_MB = (start_B <= number_M) & (number_M < start_B + pieces_B)
    of = lambda x_B: jnp.where(here_MB, x_B, 0).sum(axis=1, dtype=jnp.int32)
    return Prefixes(
        first_B,
        jnp.where(first_B > 0, place_B, B + ROWS),
        count,
        of(leader_B),
        (number_M[:, 0] - of(start_B)) * block_S,
        of(place_B),
    )


def most_pieces(B: int, S: int, block_S: int) -> int:
    """More shared pieces than this cannot be: a group of LEAST_ROWS makes one for each block."""
    return B // LEAST_ROWS * pl.cdiv(S, block_S)


class PrefixRefs(NamedTuple):
    """The kernel's memory for it: its first four arguments, and the last of its scratch.

    The softmax that runs is that of the rows whose turn it is. It has a column for each of their
    query heads, so that sums over the cache's columns and factors of a head are cheap.
    """

    first: Any
    place: Any
    count: Any
    piece_place: Any
    query: Any
    top: Any
    weight: Any
    sum: Any
    running_top: Any
    running_weight: Any
    running_sum: Any

    @property
    def states(self):
        """Each part of the running softmax, and where it goes at the end."""
        return (
            (self.running_top, self.top),
            (self.running_weight, self.weight),
            (self.running_sum, self.sum),
        )

    def enter(self, query_ref) -> None:
        """Puts the queries at their places, and makes softmaxes that have seen nothing."""
        B, K, G, _ = query_ref.shape

        def row(b, _):
            for k in range(K):
                self.query[k, self.place[b], :G] = query_ref[b, k].astype(jnp.float32)

        jax.lax.fori_loop(0, B, row, None, unroll=8)
        for empty, (running, ref) in zip((HIDDEN_SCORE, 0, 0), self.states, strict=True):
            nobody = ref.at[:, ref.shape[1] - 1]
            nobody[...] = jnp.full(nobody.shape, empty, jnp.float32)
            running[...] = jnp.full(running.shape, empty, jnp.float32)

    def state(self, row, k: int, G: int) -> list[jax.Array]:
        """Top, total and weighted sum of what the row has seen together with others, [G, H]."""
        return [ref[k, self.place[row], :G] for _, ref in self.states]

    def work(self, memory, slot, number, pieces, operand_dtype) -> None:
        """Takes a group, whose first piece has that number, into the softmaxes of its rows."""
        _, _, K, block_S, _ = memory.key_blocks.shape
        found = self._attend(memory, slot, number, pieces, operand_dtype)
        for u, piece in enumerate(pieces):
            for k in range(K):
                self._merge(piece.own == 0, k, found[u * K + k])
            last = self.first[piece.row] <= piece.own + block_S
            # Those that fill the group come behind all that is left to rows.
            real = number + u < self.count[0]
            pl.when(last & real)(functools.partial(self._leave, number + u))

    def _attend(self, memory, slot, number, pieces, operand_dtype):
        """As pallas_tpu's, with a column for every query head: of ROWS rows at a time."""
        product = functools.partial(
            jax.lax.dot_general,
            precision=precision_of(operand_dtype),
            preferred_element_type=jnp.float32,
        )
        K, H = self.query.shape[0], self.query.shape[-1]
        chains = [(u, piece, k) for u, piece in enumerate(pieces) for k in range(K)]
        scores = []
        for u, piece, k in chains:
            query = self.query[k, pl.ds(self.piece_place[number + u], ROWS)]
            query = query.reshape(-1, H).astype(operand_dtype)
            key = memory.key_blocks[slot, u, k].astype(operand_dtype)
            score = product(key, query, (((1,), (1,)), ((), ()))) * H**-0.5
            column = piece.start + jax.lax.broadcasted_iota(jnp.int32, score.shape, 0)
            seen = (column >= piece.own) & (column < self.first[piece.row])
            scores.append(jnp.where(seen, score, HIDDEN_SCORE))
        least = HIDDEN_SCORE / 2
        tops = [jnp.maximum(score.max(axis=0, keepdims=True), least) for score in scores]
        weights = [jnp.exp(score - top) for score, top in zip(scores, tops, strict=True)]
        found = []
        for (u, _, k), top, weight in zip(chains, tops, weights, strict=True):
            value = memory.value_blocks[slot, u, k].astype(operand_dtype)
            summed = product(value, weight.astype(operand_dtype), (((0,), (0,)), ((), ())))
            found.append((top, weight.sum(axis=0, keepdims=True), summed))
        return found

    def _merge(self, anew, k: int, found) -> None:
        """Adds one piece to the running softmax."""
        piece_top, piece_weight, piece_sum = found
        top = jnp.where(anew, HIDDEN_SCORE, self.running_top[k])
        new_top = jnp.maximum(top, piece_top)
        keep, add = jnp.exp(top - new_top), jnp.exp(piece_top - new_top)
        self.running_top[k] = new_top
        self.running_weight[k] = keep * self.running_weight[k] + add * piece_weight
        self.running_sum[k] = keep * self.running_sum[k] + add * piece_sum

    def _leave(self, number) -> None:
        """Leaves the running softmax to its rows."""
        rows = pl.ds(self.piece_place[number], ROWS)
        K, H, _ = self.running_sum.shape
        for k in range(K):
            for running, ref in self.states:
                wide = jnp.broadcast_to(running[k], self.running_sum.shape[1:])
                ref[k, rows] = wide.T.reshape(ROWS, -1, H)


def scratch(B: int, K: int, G: int, H: int) -> list[Any]:
    """Queries and softmaxes of all places; the last is that of the rows that share nothing."""
    heads = _heads(G)
    places = pltpu.VMEM((K, B + ROWS + 1, heads, H), jnp.float32)
    running = [pltpu.VMEM((K, height, ROWS * heads), jnp.float32) for height in (1, 1, H)]
    return [places] * 4 + running


def chain_bytes(block_S: int, G: int, H: int) -> int:
    """Scores and weighted sums of one piece and key/value head, which find no room in registers."""
    return 4 * (block_S + H) * ROWS * _heads(G)


def _heads(G: int) -> int:
    """Query heads of a key/value head, filled up to whole registers."""
    return pl.cdiv(G, SUBLANES) * SUBLANES
