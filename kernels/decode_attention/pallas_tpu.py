"""`decode_attention` as one TPU kernel that reads of every row only the blocks up to its position.

For readers new to Pallas: HBM is the large memory of the device, VMEM the fast one (about 128 MiB
on a v6e core) that the vector and matrix units read, SMEM a small one for scalars. A kernel runs
once for each point of its grid, in order, and usually Pallas copies its blocks in and out. Here it
does not: rows have different lengths, a grid has one size, so the grid is a single point and the
kernel walks a list of its own and starts its copies by hand.

**The list.** A *piece* is `block_S` columns of one row, for all key/value heads; `pieces.py` lists
the pieces of all rows, row by row, in SMEM. The kernel works on `group` pieces at a time. Group n
lies in VMEM slot n % SLOTS. While it is worked on, the copies of the next SLOTS - 1 groups run.
Pieces that several rows share come first in the list (shared_prefixes.py).

**In VMEM for the whole call:** the queries, the new columns and the outputs of all rows; the tile
around each row's new column, since the copy that writes it back may read it until the end; the
running softmax of the row at hand. **In VMEM for SLOTS groups:** blocks of the caches. The caches
themselves stay in HBM, where outputs alias inputs, so that nothing but one tile a row is written.

**Who writes what.** A row's new column is set in the piece that holds its position: in the block in
VMEM, before it is attended to, and in the tile around it, which is copied back. (HBM packs 16
columns in bfloat16, 8 in float32, into a tile and takes whole tiles only.) `out` of a row is stored
after each of its pieces; the last one overwrites the others.

**Carried from piece to piece:** top, total and weighted sum of the row's softmax, float32 (online
softmax: on a higher top the sums so far are scaled down). Every piece first makes a softmax of its
own, so that none waits for another before the merge. The sums are divided only for the output.

**Numerics.** Operands of the products are `operand_dtype`; products, sums and exponentials are
float32. Masked scores are -1e30 and not -inf, since the difference of two infinities is NaN.

**Sizes.** A group holds about 1 MB of cache in bfloat16, enough to hide what it costs to start its
copies; `KernelPlan.resources` adds up the VMEM.

Dimension key: that of reference.py.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.decode_attention import shared_prefixes as prefixes
from kernels.decode_attention.pieces import LANES, KernelPlan
from kernels.decode_attention.reference import Attended
from kernels.decode_attention.xla import HIDDEN_SCORE, precision_of

CHAINS = 16
"""Softmaxes of a group, each over 128 columns of one head. They do not depend on each other, so the
compiler fills the waits of one with the work of others. It unrolls them all: more is more code."""


def decode_attention(
    query_BNH: jax.Array,
    new_key_BKH: jax.Array,
    new_value_BKH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    position_B: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    leader_B: jax.Array | None = None,
    shared_B: jax.Array | None = None,
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
    # Fewer rows share too little to pay, and the lists would be empty, which Mosaic refuses.
    shares = leader_B is not None and B >= prefixes.LEAST_ROWS
    plan = KernelPlan(B, N, K, S, H, block_S, group, key_BKSH.dtype, shares)
    plan.check(interpret)
    position_B = jnp.clip(position_B.astype(jnp.int32), 0, S - 1)  # every row must write once
    scalars = plan.scalars(position_B, leader_B, shared_B)
    vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.VMEM, pltpu.HBM))
    # Without a memory space XLA at times moves a whole cache to VMEM and back.
    cache = pltpu.HBM(key_BKSH.shape, key_BKSH.dtype)
    out_BKGH, key_BKSH, value_BKSH = pl.pallas_call(
        functools.partial(_kernel, operand_dtype=jnp.dtype(operand_dtype), shares=plan.shares),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),  # the kernel loops over its own list
            in_specs=[vmem, vmem, vmem, hbm, hbm],
            out_specs=[vmem, hbm, hbm],
            scratch_shapes=plan.scratch(),
        ),
        out_shape=[jax.ShapeDtypeStruct((B, K, N // K, H), query_BNH.dtype), cache, cache],
        # The caches are updated in place: arguments 3 and 4 behind the scalars are outputs 1 and 2.
        input_output_aliases={len(scalars) + 3: 1, len(scalars) + 4: 2},
        interpret=interpret,
        name="decode_attention",
        **plan.resources(query_BNH.dtype),
    )(
        *scalars,
        query_BNH.reshape(B, K, N // K, H),
        plan.columns(new_key_BKH),
        plan.columns(new_value_BKH),
        key_BKSH,
        value_BKSH,
    )
    return Attended(out_BKGH.reshape(B, N, H), key_BKSH, value_BKSH)


class _Piece(NamedTuple):
    """One block of one row inside the kernel."""

    row: jax.Array
    start: jax.Array
    """Column where the block begins in its row. Where S is no multiple of the block, the last one
    of a row begins earlier than its number says, so that it ends with the row."""
    own: jax.Array
    """The first column that no earlier block holds; columns before it are masked."""
    position: jax.Array
    """Of the row's new column; -1 for what fills the last group, so that it attends to nothing."""


class _Refs(NamedTuple):
    """The kernel's memory, in the order of its arguments: scalars, inputs, outputs, scratch."""

    # SMEM: the work list.
    position: Any  # [B]
    row: Any  # [M]
    own: Any  # [M]
    total: Any  # [1], pieces without those that fill the last group
    # VMEM, whole, for the whole call.
    query: Any  # [B, K, G, H]
    new_key: Any  # float32 [K, B, H]
    new_value: Any
    # HBM; the outputs `key` and `value` are the same memory, so these two are not read.
    key_in: Any
    value_in: Any
    out: Any  # VMEM [B, K, G, H]
    key: Any  # HBM [B, K, S, H]
    value: Any
    # VMEM scratch.
    key_blocks: Any  # [SLOTS, group, K, block_S, H]
    value_blocks: Any
    key_tiles: Any  # [B, K, tile, H], until the copy back has ended
    value_tiles: Any
    top: Any  # float32 [K, G, H]: the running softmax of the row at hand. top and weight are
    weight: Any  # one number a query head, repeated over H, so that merging needs no broadcast
    sum: Any
    # Semaphores that count the bytes of copies.
    arrived: Any  # one for each slot
    written: Any

    @property
    def sides(self):
        """Cache, blocks, tiles and new columns: once for keys, once for values."""
        return (
            (self.key, self.key_blocks, self.key_tiles, self.new_key),
            (self.value, self.value_blocks, self.value_tiles, self.new_value),
        )

    @property
    def groups(self) -> jax.Array:
        """int32: groups of pieces, the last one filled up."""
        group = self.key_blocks.shape[1]
        return jax.lax.div(self.total[0] + group - 1, group)

    def pieces(self, number) -> list[_Piece]:
        """The pieces of one group; a Python list, so that all loops over it are unrolled."""
        _, group, _, block_S, _ = self.key_blocks.shape
        S = self.key.shape[2]
        found = []
        for u in range(group):
            m = number * group + u
            row, own = self.row[m], self.own[m]
            start = pl.multiple_of(jnp.minimum(own, S - block_S), self.key_tiles.shape[2])
            position = jnp.where(m < self.total[0], self.position[row], -1)
            found.append(_Piece(row, start, own, position))
        return found

    def fetch(self, number) -> None:
        """Starts the copies of a group into its slot, if there is a group of that number."""
        slots, _, _, block_S, _ = self.key_blocks.shape

        @pl.when(number < self.groups)
        def _():
            slot = jax.lax.rem(number, slots)
            for u, piece in enumerate(self.pieces(number)):
                for cache, blocks, _, _ in self.sides:
                    source = cache.at[piece.row, :, pl.ds(piece.start, block_S)]
                    pltpu.make_async_copy(source, blocks.at[slot, u], self.arrived.at[slot]).start()

    def wait(self, slot) -> None:
        """Waits until all of a group has arrived.

        A copy descriptor that is never started only says how many bytes to wait for.
        """
        for _, blocks, _, _ in self.sides:
            pltpu.make_async_copy(blocks.at[slot], blocks.at[slot], self.arrived.at[slot]).wait()

    def set_column(self, slot, u, piece: _Piece) -> None:
        """Puts the row's new column into its block and starts to copy its tile back.

        A mask chooses the column inside the tile: a single packed row cannot be stored.
        """
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


def _kernel(*refs, operand_dtype, shares):
    prefix = None
    if shares:
        prefix, refs = prefixes.PrefixRefs(*refs[:4], *refs[-7:]), refs[4:-7]
    memory = _Refs(*refs)
    slots, group = memory.key_blocks.shape[:2]
    # Fresh VMEM may hold NaN, and the first merge multiplies the state by 0: it must be finite.
    for ref in (memory.top, memory.weight, memory.sum):
        ref[...] = jnp.zeros_like(ref)

    def work(number, _):
        slot = jax.lax.rem(number, slots)
        # Into the slot of the group before this one, which has been worked on.
        memory.fetch(number + slots - 1)
        memory.wait(slot)
        pieces = memory.pieces(number)
        alone = functools.partial(_work_single_rows, memory, prefix, slot, pieces, operand_dtype)
        if prefix is None:
            alone()
            return
        together = functools.partial(
            prefix.work_group, memory, slot, number * group, pieces, operand_dtype
        )
        jax.lax.cond(number * group < prefix.total[0], together, alone)

    for number in range(slots - 1):
        memory.fetch(jnp.int32(number))
    if prefix is not None:
        prefix.load_queries(memory.query)
    jax.lax.fori_loop(0, memory.groups, work, None)
    # Every row has written one tile, so that all tiles together are the bytes to wait for.
    for tiles in (memory.key_tiles, memory.value_tiles):
        pltpu.make_async_copy(tiles, tiles, memory.written).wait()


def _work_single_rows(memory: _Refs, prefix, slot, pieces, operand_dtype) -> None:
    """Works on a group whose pieces belong to one row each: set the column, attend, merge."""
    block_S = memory.key_blocks.shape[3]
    for u, piece in enumerate(pieces):
        last = (piece.position >= piece.own) & (piece.position < piece.start + block_S)
        pl.when(last)(functools.partial(memory.set_column, slot, u, piece))
    _merge(memory, prefix, pieces, _attend(memory, slot, pieces, operand_dtype))


def _attend(memory: _Refs, slot, pieces, operand_dtype):
    """Top [G, 1], total [G, 1] and weighted sum [G, H] of each piece's softmax for each head k.

    float32, in the order (piece, head), not divided. All products query x key stand before all
    exponentials, and those before all products weight x value: in turns each would wait for the
    one before it.
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
    # Where every score is masked the top would be masked too, and exp(0) = 1 would weigh garbage.
    # A top of half the masked score makes those weights exp(-5e29) = 0.
    least = HIDDEN_SCORE / 2
    tops = [jnp.maximum(score.max(axis=1, keepdims=True), least) for score in scores]
    weights = [jnp.exp(score - top) for score, top in zip(scores, tops, strict=True)]
    found = []
    for (u, _, k), top, weight in zip(chains, tops, weights, strict=True):
        value = memory.value_blocks[slot, u, k].astype(operand_dtype)
        summed = product(weight.astype(operand_dtype), value, (((1,), (0,)), ((), ())))
        found.append((top, weight.sum(axis=1, keepdims=True), summed))
    return found


def _merge(memory: _Refs, prefix: prefixes.PrefixRefs | None, pieces, found):
    """Adds pieces to the running softmax of their row, and stores the row's output so far.

    The state of one head is held in registers over the pieces of the group.
    """
    K = memory.query.shape[1]
    for k in range(K):
        state = memory.top[k], memory.weight[k], memory.sum[k]
        for u, piece in enumerate(pieces):
            top, weight, summed = _state_before(prefix, piece, k, state)
            piece_top, piece_weight, piece_sum = found[u * K + k]
            new_top = jnp.maximum(top, piece_top)
            keep, add = jnp.exp(top - new_top), jnp.exp(piece_top - new_top)
            weight = keep * weight + add * piece_weight
            summed = keep * summed + add * piece_sum
            memory.out[piece.row, k] = (summed / weight).astype(memory.out.dtype)
            state = new_top, weight, summed
        memory.top[k], memory.weight[k], memory.sum[k] = state


def _state_before(prefix: prefixes.PrefixRefs | None, piece: _Piece, k: int, state):
    """The state that a piece is merged into.

    At a row's first piece that is an empty softmax: a top of -1e30 scales the sums of the row
    before by exp(-1e30 - top) = 0. With shared prefixes it is what the row has seen together with
    others. Pieces that fill the last group begin nothing.
    """
    top, weight, summed = state
    real = piece.position >= 0
    if prefix is None:
        return jnp.where((piece.own == 0) & real, HIDDEN_SCORE, top), weight, summed
    first = (piece.own == prefix.first[piece.row]) & real
    entered = prefix.state(piece.row, k, top.shape[0])
    return [jnp.where(first, one, other) for one, other in zip(entered, state, strict=True)]
