"""`decode_attention` as one TPU kernel that reads of every row only the blocks up to its position.

The blocks of all rows form one list of pieces, which are worked on in groups while later groups
arrive. Every piece has a softmax of its own, so that none waits for another before the pieces of a
row are merged. A row's new column is set in its last block where that lies in VMEM, and the tile
around it is copied back: memory takes packed columns in whole tiles only.

Dimension key: that of reference.py, and
    M: pieces, as many as there could be
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.decode_attention.reference import Attended
from kernels.decode_attention.xla import HIDDEN_SCORE, precision_of

LANES = 128
SLOTS = 3
"""Groups in VMEM: one is worked on while the others arrive, each 1 MB in bfloat16."""
CHAINS = 16
"""Softmaxes of a group: the compiler fills the waits of one with others, and unrolls them all."""
SPARE_BYTES = 4 << 20
"""VMEM for registers that spill and for small arrays."""


def decode_attention(
    query_BNH: jax.Array,
    new_key_BKH: jax.Array,
    new_value_BKH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    position_B: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    block_S: int | None = None,
    chains: int = CHAINS,
    interpret: bool = False,
) -> Attended:
    """Same contract as xla.decode_attention, for caches that are made of whole tiles.

    Args:
        block_S: columns that are read at a time; a multiple of a tile's. None takes 128, or 256
            where they are too few bytes for what it costs to ask for them.
        chains: softmaxes over at most 128 columns of one key/value head that are worked on
            together; about 1 MB of cache should lie in them.
        interpret: run on any device.

    Raises:
        ValueError: if H is no multiple of 128 (interpreted, any will do), or S or block_S none of
            a tile's columns, which are 16 in bfloat16 and 8 in float32.
    """
    B, N, H = query_BNH.shape
    _, K, S, _ = key_BKSH.shape
    block_S = block_S or (LANES if K * H > LANES else 2 * LANES)
    block_S = min(block_S, S)
    group = max(1, chains * LANES // (K * max(block_S, LANES)))
    plan = _Plan(B, N, K, S, H, block_S, group, key_BKSH.dtype)
    plan.check(interpret)
    position_B = jnp.clip(position_B.astype(jnp.int32), 0, S - 1)  # every row must write once
    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.HBM))
    # A cache that may lie anywhere is at times carried to VMEM and back as a whole.
    cache = pltpu.HBM(key_BKSH.shape, key_BKSH.dtype)
    out_BKGH, key_BKSH, value_BKSH = pl.pallas_call(
        functools.partial(_kernel, operand_dtype=jnp.dtype(operand_dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[vmem, vmem, vmem, hbm, hbm],
            out_specs=[vmem, hbm, hbm],
            scratch_shapes=plan.scratch(),
        ),
        out_shape=[jax.ShapeDtypeStruct((B, K, N // K, H), query_BNH.dtype), cache, cache],
        input_output_aliases={7: 1, 8: 2},
        interpret=interpret,
        name="decode_attention",
        **plan.resources(query_BNH.dtype),
    )(
        position_B,
        *plan.pieces(position_B),
        query_BNH.reshape(B, K, N // K, H),
        plan.columns(new_key_BKH),
        plan.columns(new_value_BKH),
        key_BKSH,
        value_BKSH,
    )
    return Attended(out_BKGH.reshape(B, N, H), key_BKSH, value_BKSH)


class _Plan(NamedTuple):
    """Sizes of one call."""

    B: int
    N: int
    K: int
    S: int
    H: int
    block_S: int
    group: int
    """Pieces that are fetched and worked on together."""
    dtype: Any
    """Of the cache."""

    @property
    def tile(self) -> int:
        """Columns that lie together in memory."""
        return 32 // self.dtype.itemsize

    def check(self, interpret: bool) -> None:
        if self.H % LANES and not interpret:
            raise ValueError(
                f"the TPU kernel takes head sizes that are multiples of {LANES}, since copies move "
                f"whole lanes; got H={self.H}: take `xla`"
            )
        if self.S % self.tile or self.block_S % self.tile:
            raise ValueError(
                f"S={self.S} and block_S={self.block_S} must be multiples of {self.tile}, the "
                f"columns of a tile of {self.dtype}"
            )

    def scratch(self) -> list[Any]:
        blocks = pltpu.VMEM((SLOTS, self.group, self.K, self.block_S, self.H), self.dtype)
        tiles = pltpu.VMEM((self.B, self.K, self.tile, self.H), self.dtype)
        state = pltpu.VMEM((self.K, self.N // self.K, self.H), jnp.float32)
        semaphores = pltpu.SemaphoreType.DMA
        per_group, single = semaphores((SLOTS,)), semaphores(())
        return [blocks, blocks, tiles, tiles, state, state, state, per_group, single]

    def resources(self, query_dtype) -> dict[str, Any]:
        """What XLA must know: the work of full rows, and the VMEM."""
        B, N, K, S, H = self[:5]
        columns = SLOTS * self.group * self.block_S + B * self.tile
        # Query and output, whose heads of a group may fill a fraction of a tile.
        small_bytes = 2 * B * K * max(N // K, 8) * H * query_dtype.itemsize + 2 * B * K * H * 4
        return dict(
            cost_estimate=pl.CostEstimate(
                flops=4 * B * N * S * H,
                transcendentals=B * N * S,
                bytes_accessed=2 * B * K * S * H * self.dtype.itemsize,
            ),
            compiler_params=pltpu.CompilerParams(
                vmem_limit_bytes=2 * columns * K * H * self.dtype.itemsize
                + 2 * small_bytes
                + SPARE_BYTES
            ),
        )

    def pieces(self, position_B) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Row and block of every piece, int32 [M], and how many there are, int32 [1].

        Those behind the last, which fill its group, repeat it.
        """
        blocks_B = position_B // self.block_S + 1
        end_B = jnp.cumsum(blocks_B)
        most = self.B * pl.cdiv(self.S, self.block_S)
        count_M = jnp.arange(pl.cdiv(most, self.group) * self.group, dtype=jnp.int32)
        count_M = jnp.minimum(count_M, end_B[-1] - 1)
        before_MB = end_B <= count_M[:, None]
        row_M = before_MB.sum(axis=1, dtype=jnp.int32)
        block_M = count_M - jnp.where(before_MB, blocks_B, 0).sum(axis=1)
        return row_M, block_M, end_B[-1:]

    def columns(self, new_BKH) -> jax.Array:
        """float32 [K, B, H], rounded as the cache: of packed numbers no single row can be read."""
        return new_BKH.astype(self.dtype).astype(jnp.float32).swapaxes(0, 1)


class _Piece(NamedTuple):
    """One block of one row inside the kernel."""

    row: jax.Array
    start: jax.Array
    """Column where the block begins in its row: the last one of a row begins earlier than its
    number says where S is no multiple of the block."""
    own: jax.Array
    """The first column that no earlier block has."""
    position: jax.Array
    """Of the row's new column; -1 behind the last piece, which sees nothing."""


class _Refs(NamedTuple):
    """The kernel's memory, in the order of its arguments."""

    position: Any
    row: Any
    block: Any
    total: Any
    query: Any
    new_key: Any
    new_value: Any
    key_in: Any
    value_in: Any
    out: Any
    key: Any
    value: Any
    key_blocks: Any
    value_blocks: Any
    key_tiles: Any
    value_tiles: Any
    top: Any
    weight: Any
    sum: Any
    arrived: Any
    written: Any

    @property
    def sides(self):
        """Cache, blocks, tiles and new columns of keys and of values."""
        return (
            (self.key, self.key_blocks, self.key_tiles, self.new_key),
            (self.value, self.value_blocks, self.value_tiles, self.new_value),
        )

    @property
    def groups(self) -> jax.Array:
        group = self.key_blocks.shape[1]
        return jax.lax.div(self.total[0] + group - 1, group)

    def pieces(self, number) -> list[_Piece]:
        """Those of a group."""
        _, group, _, block_S, _ = self.key_blocks.shape
        S = self.key.shape[2]
        found = []
        for u in range(group):
            m = number * group + u
            row, own = self.row[m], self.block[m] * block_S
            start = pl.multiple_of(jnp.minimum(own, S - block_S), self.key_tiles.shape[2])
            position = jnp.where(m < self.total[0], self.position[row], -1)
            found.append(_Piece(row, start, own, position))
        return found

    def fetch(self, number) -> None:
        """Starts the copies of a group, if there is one of that number."""
        slots, _, _, block_S, _ = self.key_blocks.shape

        @pl.when(number < self.groups)
        def _():
            slot = jax.lax.rem(number, slots)
            for u, piece in enumerate(self.pieces(number)):
                for cache, blocks, _, _ in self.sides:
                    source = cache.at[piece.row, :, pl.ds(piece.start, block_S)]
                    pltpu.make_async_copy(source, blocks.at[slot, u], self.arrived.at[slot]).start()

    def wait(self, slot) -> None:
        """Until all of a group has arrived."""
        for _, blocks, _, _ in self.sides:
            pltpu.make_async_copy(blocks.at[slot], blocks.at[slot], self.arrived.at[slot]).wait()

    def set_column(self, slot, u, piece: _Piece) -> None:
        """Puts the row's new column into its block and starts to copy its tile back."""
        _, K, tile, H = self.key_tiles.shape
        first = pl.multiple_of(piece.position & -tile, tile)
        here = jax.lax.broadcasted_iota(jnp.int32, (tile, H), 0) == piece.position - first
        inside = pl.ds(pl.multiple_of(first - piece.start, tile), tile)
        for cache, blocks, tiles, new in self.sides:
            for k in range(K):
                column = new[k, pl.ds(piece.row, 1)]
                mixed = jnp.where(here, column, blocks[slot, u, k, inside].astype(jnp.float32))
                blocks[slot, u, k, inside] = mixed.astype(blocks.dtype)
                tiles[piece.row, k] = mixed.astype(blocks.dtype)
            target = cache.at[piece.row, :, pl.ds(first, tile)]
            pltpu.make_async_copy(tiles.at[piece.row], target, self.written).start()


def _kernel(*refs, operand_dtype):
    memory = _Refs(*refs)
    slots, _, _, block_S, _ = memory.key_blocks.shape
    for ref in (memory.top, memory.weight, memory.sum):
        ref[...] = jnp.zeros_like(ref)

    def work(number, _):
        slot = jax.lax.rem(number, slots)
        memory.fetch(number + slots - 1)
        memory.wait(slot)
        pieces = memory.pieces(number)
        for u, piece in enumerate(pieces):
            last = (piece.position >= piece.own) & (piece.position < piece.start + block_S)
            pl.when(last)(functools.partial(memory.set_column, slot, u, piece))
        _merge(memory, pieces, _attend(memory, slot, pieces, operand_dtype))

    for number in range(slots - 1):
        memory.fetch(jnp.int32(number))
    jax.lax.fori_loop(0, memory.groups, work, None)
    for tiles in (memory.key_tiles, memory.value_tiles):  # as many bytes as were written
        pltpu.make_async_copy(tiles, tiles, memory.written).wait()


def _attend(memory: _Refs, slot, pieces, operand_dtype):
    """Top, total and weighted sum of every piece's softmax for every key/value head, not divided.

    The products of one kind stand together: in turns they would wait for each other.
    """
    _, K, G, H = memory.query.shape
    block_S = memory.key_blocks.shape[3]
    product = functools.partial(
        jax.lax.dot_general,
        precision=precision_of(operand_dtype),
        preferred_element_type=jnp.float32,
    )
    offset = jax.lax.broadcasted_iota(jnp.int32, (G, block_S), 1)
    chains = [(u, piece, k) for u, piece in enumerate(pieces) for k in range(K)]
    scores = []
    for u, piece, k in chains:
        query = memory.query[piece.row, k].astype(operand_dtype)
        key = memory.key_blocks[slot, u, k].astype(operand_dtype)
        score = product(query, key, (((1,), (1,)), ((), ()))) * H**-0.5
        column = piece.start + offset
        seen = (column >= piece.own) & (column <= piece.position)
        scores.append(jnp.where(seen, score, HIDDEN_SCORE))
    # A piece that sees nothing gets weights of zero: garbage times one may overflow.
    least = HIDDEN_SCORE / 2
    tops = [jnp.maximum(score.max(axis=1, keepdims=True), least) for score in scores]
    weights = [jnp.exp(score - top) for score, top in zip(scores, tops, strict=True)]
    found = []
    for (u, _, k), top, weight in zip(chains, tops, weights, strict=True):
        value = memory.value_blocks[slot, u, k].astype(operand_dtype)
        summed = product(weight.astype(operand_dtype), value, (((1,), (0,)), ((), ())))
        found.append((top, weight.sum(axis=1, keepdims=True), summed))
    return found


def _merge(memory: _Refs, pieces, found):
    """Adds pieces to the state of their row and stores the row's output so far."""
    K = memory.query.shape[1]
    for k in range(K):
        top, weight, summed = memory.top[k], memory.weight[k], memory.sum[k]
        for u, piece in enumerate(pieces):
            piece_top, piece_weight, piece_sum = found[u * K + k]
            top = jnp.where((piece.own == 0) & (piece.position >= 0), HIDDEN_SCORE, top)
            new_top = jnp.maximum(top, piece_top)
            keep, add = jnp.exp(top - new_top), jnp.exp(piece_top - new_top)
            top = new_top
            weight = keep * weight + add * piece_weight
            summed = keep * summed + add * piece_sum
            memory.out[piece.row, k] = (summed / weight).astype(memory.out.dtype)
        memory.top[k], memory.weight[k], memory.sum[k] = top, weight, summed
