"""Shared prefixes: the part of the TPU kernel of pallas_tpu.py for rows that begin alike.

The completions of one prompt have the same first columns of keys and values. Those are read once,
from the row of the group's *leader*, for up to ROWS rows of the group together: the queries of the
rows stand side by side and make one matrix product with each block. The softmax state that this
leaves is where the blocks of each single row go on.

**Places.** Rows that share are ordered by group, and the number of a row in that order is its
*place*. Queries and final states lie in VMEM by place. A piece is always worked on for ROWS places
in a row, whether or not the group has that many: the places behind it belong to groups whose own
pieces come later and start with an empty softmax, so what was computed for them is overwritten.

**In VMEM for the whole call:** queries, tops, totals and weighted sums by place, each float32
[K, places, heads, H]. **Carried from piece to piece:** one running softmax for the ROWS rows whose
turn it is. It is transposed, [.., ROWS * heads] with a query head in each lane, so that sums over
the columns of the cache run over sublanes, which is cheap, and factors of a head are one row.
After the last piece of a group it is transposed back and stored at the places of its rows.

**Numerics:** as in pallas_tpu.py.

Dimension key: that of reference.py, and
    M: places in the list: the shared pieces that there could be
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.decode_attention.xla import HIDDEN_SCORE, precision_of

ROWS = 16
"""Rows that are worked on together: with eight query heads each they fill the 128 lanes."""
LEAST_ROWS = 3
"""Fewer rows are not treated as sharing: what two save, filling up the last group may cost."""
SUBLANES = 8
"""Rows of a float32 register; query heads are padded to a multiple."""


class Prefixes(NamedTuple):
    """Which rows share which columns, in one token step."""

    first_B: jax.Array
    """int32: first column that the row does not share; 0 where it shares nothing."""
    place_B: jax.Array
    """int32: the row's place; behind all places where it shares nothing."""
    total: jax.Array
    """int32 [1]: the number of shared pieces."""
    row_M: jax.Array
    """int32: the leader whose block the piece is. Behind the last piece it is repeated."""
    own_M: jax.Array
    """int32: column where the piece begins."""
    place_M: jax.Array
    """int32: place of the first row that the piece is for."""


def find_prefixes(
    position_B, leader_B, shared_B, *, tile: int, block_S: int, most: int
) -> Prefixes:
    """Lists the shared pieces in the order of their places.

    A group of more than ROWS rows has its pieces listed once for every ROWS of them.

    Args:
        position_B, leader_B, shared_B: as ops.decode_attention takes them.
        tile: a row's own blocks may begin at its multiples only, so the shared columns are
            rounded down to one.
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
    """Upper bound on the shared pieces: each group has at least LEAST_ROWS rows."""
    return B // LEAST_ROWS * pl.cdiv(S, block_S)


class PrefixRefs(NamedTuple):
    """The kernel's memory for shared prefixes: its first four arguments, and its last scratch."""

    # SMEM, as the fields of Prefixes.
    first: Any  # [B]
    place: Any  # [B]
    total: Any  # [1]
    piece_place: Any  # [M]
    # VMEM by place, float32 [K, places, heads, H].
    query: Any
    top: Any
    weight: Any
    sum: Any
    # VMEM, the running softmax of ROWS rows, float32 [K, 1 (sum: H), ROWS * heads].
    running_top: Any
    running_weight: Any
    running_sum: Any

    @property
    def states(self):
        """Top, total and sum: the running one, and where it is stored at the end of a group."""
        return (
            (self.running_top, self.top),
            (self.running_weight, self.weight),
            (self.running_sum, self.sum),
        )

    def load_queries(self, query_ref) -> None:
        """Copies the queries to their places, and makes empty softmaxes.

        The last place stays empty: rows that share nothing read their first state from it.
        """
        B, K, G, _ = query_ref.shape

        def row(b, _):
            for k in range(K):
                self.query[k, self.place[b], :G] = query_ref[b, k].astype(jnp.float32)

        jax.lax.fori_loop(0, B, row, None, unroll=8)
        for empty, (running, ref) in zip((HIDDEN_SCORE, 0, 0), self.states, strict=True):
            unshared = ref.at[:, ref.shape[1] - 1]
            unshared[...] = jnp.full(unshared.shape, empty, jnp.float32)
            running[...] = jnp.full(running.shape, empty, jnp.float32)

    def state(self, row, k: int, G: int) -> list[jax.Array]:
        """Top, total and weighted sum over the row's shared columns, float32 [G, H] each."""
        return [ref[k, self.place[row], :G] for _, ref in self.states]

    def work_group(self, memory, slot, number, pieces, operand_dtype) -> None:
        """Works on one group of shared pieces, the first of which has that number in the list."""
        _, _, K, block_S, _ = memory.key_blocks.shape
        found = self._attend(memory, slot, number, pieces, operand_dtype)
        for u, piece in enumerate(pieces):
            for k in range(K):
                self._merge(piece.own == 0, k, found[u * K + k])
            last = self.first[piece.row] <= piece.own + block_S
            # Pieces that fill up the last group repeat its last one, whose state is stored already.
            real = number + u < self.total[0]
            pl.when(last & real)(functools.partial(self._store, number + u))

    def _attend(self, memory, slot, number, pieces, operand_dtype):
        """As pallas_tpu._attend for ROWS rows at once, transposed: a lane for each query head.

        Scores are [block_S, ROWS * heads], weighted sums [H, ROWS * heads].
        """
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
        """Adds one piece to the running softmax; `anew` (its own is 0) begins an empty one."""
        piece_top, piece_weight, piece_sum = found
        top = jnp.where(anew, HIDDEN_SCORE, self.running_top[k])
        new_top = jnp.maximum(top, piece_top)
        keep, add = jnp.exp(top - new_top), jnp.exp(piece_top - new_top)
        self.running_top[k] = new_top
        self.running_weight[k] = keep * self.running_weight[k] + add * piece_weight
        self.running_sum[k] = keep * self.running_sum[k] + add * piece_sum

    def _store(self, number) -> None:
        """Transposes the running softmax and stores it at the places of its rows."""
        rows = pl.ds(self.piece_place[number], ROWS)
        K, H, _ = self.running_sum.shape
        for k in range(K):
            for running, ref in self.states:
                wide = jnp.broadcast_to(running[k], self.running_sum.shape[1:])
                ref[k, rows] = wide.T.reshape(ROWS, -1, H)


def scratch(B: int, K: int, G: int, H: int) -> list[Any]:
    """Queries and softmaxes of all places, and the running softmax.

    ROWS places more than rows, since a piece is worked on for ROWS places from its first one; and
    the place of rows that share nothing.
    """
    heads = _heads(G)
    places = pltpu.VMEM((K, B + ROWS + 1, heads, H), jnp.float32)
    running = [pltpu.VMEM((K, height, ROWS * heads), jnp.float32) for height in (1, 1, H)]
    return [places] * 4 + running


def chain_bytes(block_S: int, G: int, H: int) -> int:
    """VMEM for scores and weighted sums of one piece and head, which do not fit registers."""
    return 4 * (block_S + H) * ROWS * _heads(G)


def _heads(G: int) -> int:
    """Query heads of a key/value head, padded to whole registers."""
    return pl.cdiv(G, SUBLANES) * SUBLANES
