"""`token_logprob` as two TPU kernels: one streaming pass over the logits each.

The logits [B, T, V] stay in HBM (the large memory) in the order in which they lie there: the
kernels see them through a view that logits_tiling.py chooses, so that nothing is copied to turn
them round.

**Grid:** (sequences, blocks of tokens, blocks of the vocabulary), the last one fastest. Each point
works on one tile of logits of about 4 MB, which Pallas copies to VMEM (the fast memory) while the
tile before is worked on. Blocks of tokens do not depend on each other (`parallel`); the blocks of
the vocabulary of one block of tokens run in order (`arbitrary`), since `statistics` carries state
from one to the next.

**Inside a tile** the kernels walk along the vocabulary in *slabs*: slices that fill a few
registers. Every place of a slab (a position in those registers) keeps statistics of its own over
all slabs and tiles, so that no lane waits for another. Only after the last tile of the vocabulary
are the places of a token merged.

**Carried, in VMEM scratch** (`statistics` only): top, total, weighted and chosen of every place of
a slab, float32; set at the first tile of the vocabulary. **Who writes what:** the output of
`statistics` for a block of tokens is written at the last tile of its vocabulary. Each tile of the
gradient is written by its own grid point, which carries nothing.

**Numerics:** everything but the logits is float32. Inside, logits are as stored (x), and
1 / temperature and log2(e) are one factor of their difference to the top, so that exp is exp2.
Weighted sums and slopes of the entropy are in bits accordingly. Columns outside the support are
overwritten with -inf in VMEM before a tile is read; a log-probability of -inf is clamped to -1e4
where it is a factor, since 0 * -inf is NaN.

**Sizes:** two buffers of a tile for each array that streams, that is 2 tiles for `statistics` and 4
for the gradient, and SMALL_BYTES; see `_resources`.

Dimension key:
    B: sequences (all leading dimensions but the last)
    T: tokens
    V: columns of the logits given, which may be a part of the vocabulary
    ..: any leading dimensions
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.token_logprob.logits_tiling import Tiling, make_tiling
from kernels.token_logprob.statistics import Slopes, Statistics, Support

SMALL_BYTES = 4 << 20
"""VMEM beside the tiles, for arrays per token and spilled registers."""
LEAST_BITS = -1e4
"""Stands for log2 of a probability of zero where it is a factor: 0 * -inf would be NaN."""


def statistics(
    logits: jax.Array,
    ids: jax.Array,
    support: Support,
    *,
    first_column: jax.Array | int = 0,
    minor: Literal["vocab", "time"] | None = None,
    block_tokens: int | None = None,
    block_vocab: int | None = None,
    interpret: bool = False,
) -> Statistics:
    """Same contract as xla.statistics.

    Args:
        minor: the axis in which the logits are contiguous; None is XLA's own choice for their
            shape. If they are contiguous in the other one, they are copied first.
        block_tokens: tokens (in the dense view rows of 128 tokens) of a tile.
        block_vocab: columns of a tile.
        interpret: run on any device.
    """
    *leading, V = logits.shape
    logits_BTV = _collapse(logits)
    tiling = make_tiling(logits_BTV, minor, block_tokens, block_vocab)
    behind, local = _local(ids, V, support, first_column)
    found = pl.pallas_call(
        functools.partial(_statistics_kernel, tiling=tiling, bits=_bits(support)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tiling.grid,
            in_specs=[tiling.spec(), tiling.spec(1)],
            out_specs=tiling.spec(4),
            scratch_shapes=[pltpu.VMEM(tiling.tile(tiling.slab), jnp.float32)] * 4,
        ),
        out_shape=jax.ShapeDtypeStruct(tiling.array(4), jnp.float32),
        interpret=interpret,
        name="token_logprob_statistics",
        **_resources(tiling, logits, passes=1),
    )(behind, tiling.view_of(logits_BTV), tiling.view_of(_collapse(local[..., None])))
    top, total, weighted, chosen = jnp.moveaxis(tiling.array_of(found).reshape(*leading, 4), -1, 0)
    return Statistics(
        top / support.temperature, total, weighted * math.log(2), chosen / support.temperature
    )


def logits_gradient(
    logits: jax.Array,
    ids: jax.Array,
    slopes: Slopes,
    support: Support,
    *,
    first_column: jax.Array | int = 0,
    minor: Literal["vocab", "time"] | None = None,
    block_tokens: int | None = None,
    block_vocab: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Same contract as xla.logits_gradient; further arguments as in `statistics`."""
    logits_BTV = _collapse(logits)
    tiling = make_tiling(logits_BTV, minor, block_tokens, block_vocab)
    behind, local = _local(ids, logits.shape[-1], support, first_column)
    per_token = jnp.stack(
        [
            slopes.logsumexp * support.temperature,
            slopes.shared,
            slopes.entropy * math.log(2),
            slopes.chosen,
        ],
        axis=-1,
    )
    gradient = pl.pallas_call(
        functools.partial(_gradient_kernel, tiling=tiling, bits=_bits(support)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tiling.grid,
            in_specs=[tiling.spec(), tiling.spec(1), tiling.spec(4)],
            out_specs=tiling.spec(),
        ),
        out_shape=jax.ShapeDtypeStruct(tiling.array(logits.shape[-1]), logits.dtype),
        interpret=interpret,
        name="token_logprob_gradient",
        **_resources(tiling, logits, passes=2),
    )(
        behind,
        tiling.view_of(logits_BTV),
        tiling.view_of(_collapse(local[..., None])),
        tiling.view_of(_collapse(per_token)),
    )
    return tiling.array_of(gradient).reshape(logits.shape)


def _collapse(array: jax.Array) -> jax.Array:
    """[.., T, V] as [B, T, V]; one token per sequence counts as one sequence of tokens."""
    *leading, V = array.shape
    T = leading[-1] if leading else 1
    return array.reshape((-1, T, V) if T > 1 else (1, -1, V))


def _bits(support: Support) -> float:
    """Bits per unit of a logit as stored."""
    return math.log2(math.e) / support.temperature


def _local(ids, V, support, first_column) -> tuple[jax.Array, jax.Array]:
    """int32 [1]: the number of given columns outside the support; and ids counted from the first
    given column, -1 where the id is not among them.
    """
    behind = jnp.clip(first_column + V - support.columns, 0, V).astype(jnp.int32)
    local = ids.astype(jnp.int32) - first_column
    return behind[None], jnp.where((local >= 0) & (local < V - behind), local, -1)


def _resources(tiling: Tiling, logits: jax.Array, *, passes: int) -> dict:
    """What XLA must know: the cost, for its scheduling, and the VMEM limit.

    Args:
        passes: arrays of the logits' size that stream through: 1 read, or 1 read and 1 written.
    """
    tile_bytes = math.prod(tiling.tile(tiling.block_vocab)) * logits.dtype.itemsize
    return dict(
        cost_estimate=pl.CostEstimate(
            flops=10 * logits.size,
            transcendentals=logits.size,
            bytes_accessed=passes * logits.size * logits.dtype.itemsize,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=2 * passes * tile_bytes + SMALL_BYTES,
        ),
    )


class _Tile(NamedTuple):
    """One tile inside a kernel."""

    tiling: Tiling
    logits_ref: Any
    first: jax.Array
    """Number of its first column."""
    seen: jax.Array
    """The number of its columns up to the end of the support; may be below 0 or above its own."""

    def column(self) -> jax.Array:
        """int32, of each place of a slab: number of its column in the slab."""
        tiling = self.tiling
        return jax.lax.broadcasted_iota(jnp.int32, tiling.tile(tiling.slab), tiling.vocab_axis)

    def slab(self, number) -> tuple:
        """Index of a slab in a reference to the tile."""
        slab = self.tiling.slab
        return self.tiling.at(pl.multiple_of(number * slab, slab), slab)

    def load(self, number) -> jax.Array:
        """A slab of logits, in their dtype."""
        return self.logits_ref[self.slab(number)]

    def home(self, id_ref) -> jax.Array:
        """int32, of each place: the number of the slab in which it holds the token's id, else -1.

        A comparison of slab numbers then finds the chosen logit, without a gather.
        """
        slab, slabs = self.tiling.slab, self.tiling.slabs
        start = id_ref[...] - self.first - self.column()
        number = start >> (slab.bit_length() - 1)
        held = (start & (slab - 1) == 0) & (number >= 0) & (number < slabs)
        return jnp.where(held, number, -1)

    def mask_tail(self):
        """Writes -inf over columns outside the support.

        That includes what lies beyond the end of the array in its last tile, which is undefined.
        """
        tiling = self.tiling

        @pl.when(self.seen < tiling.block_vocab)
        def _():
            def blank(number, _):
                kept = self.load(number).astype(jnp.float32)
                inside = self.column() < self.seen - number * tiling.slab
                kept = jnp.where(inside, kept, -jnp.inf).astype(self.logits_ref.dtype)
                self.logits_ref[self.slab(number)] = kept

            first = jax.lax.div(jnp.maximum(self.seen, 0), tiling.slab)
            jax.lax.fori_loop(first, tiling.slabs, blank, None)

    def fold(self, step, carry):
        """Computes carry = step(carry, number, slab) over all slabs; the carry is in registers."""
        unroll = self.tiling.unroll

        def steps(i, carry):
            for j in range(unroll):
                carry = step(carry, i * unroll + j, self.load(i * unroll + j))
            return carry

        return jax.lax.fori_loop(0, self.tiling.slabs // unroll, steps, carry)


def _statistics_kernel(behind_ref, logits_ref, id_ref, out_ref, *state_refs, tiling, bits):
    V, place = tiling.shape[-1], pl.program_id(2)
    first = place * tiling.block_vocab
    tile = _Tile(tiling, logits_ref, first, V - behind_ref[0] - first)

    @pl.when(place == 0)
    def _():
        for ref, start in zip(state_refs, (-jnp.inf, 0.0, 0.0, 0.0), strict=True):
            ref[...] = jnp.full_like(ref, start)

    tile.mask_tail()
    _accumulate(state_refs, tile, tile.home(id_ref), bits)

    @pl.when(place == pl.num_programs(2) - 1)
    def _():
        merged = _merge_places([ref[...] for ref in state_refs], tiling.vocab_axis, bits)
        for k, value in enumerate(merged):
            out_ref[tiling.at(k, 1)] = value


def _accumulate(state_refs, tile, home, bits):
    """Adds a tile to the statistics of each place.

    Two walks over the tile in VMEM: the first finds the top, the second the sums relative to it.
    Sums of earlier tiles are scaled down once a tile, not once a slab.
    """
    top_ref, total_ref, weighted_ref, chosen_ref = state_refs
    dtype = tile.logits_ref.dtype
    # Comparing numbers of the width of the logits takes half as many registers in bfloat16.
    home = home.astype(jnp.int16 if dtype.itemsize == 2 else jnp.int32)

    def find_top(found, number, x):
        largest, chosen = found
        here = home == jnp.asarray(number, home.dtype)
        return jnp.maximum(largest, x), jnp.where(here, x, chosen)

    nothing = jnp.full(home.shape, -jnp.inf, dtype), chosen_ref[...].astype(dtype)
    largest, chosen = tile.fold(find_top, nothing)
    chosen_ref[...] = chosen.astype(jnp.float32)
    old = top_ref[...]
    top = jnp.maximum(old, largest.astype(jnp.float32))
    base = jnp.where(top == -jnp.inf, 0.0, top)
    top_ref[...] = top

    def add(sums, _, x):
        total, weighted = sums
        shifted = (x.astype(jnp.float32) - base) * bits
        weight = jnp.exp2(shifted)
        return total + weight, weighted + weight * jnp.maximum(shifted, LEAST_BITS)

    drop = jnp.where(old == -jnp.inf, 0.0, old - base) * bits
    factor, total = jnp.exp2(drop), total_ref[...]
    sums = factor * total, factor * (weighted_ref[...] + drop * total)
    total_ref[...], weighted_ref[...] = tile.fold(add, sums)


def _merge_places(state, axis, bits):
    """Statistics of each token from those of its places, which lie along the vocabulary axis."""
    top, total, weighted, chosen = state
    whole = top.max(axis=axis, keepdims=True)
    drop = jnp.where(top == -jnp.inf, 0.0, top - whole) * bits
    factor = jnp.exp2(drop)
    weighted = factor * (weighted + drop * total)
    total, weighted, chosen = (
        value.sum(axis=axis, keepdims=True) for value in (factor * total, weighted, chosen)
    )
    # A maximum may pass over NaN where the sums do not.
    return jnp.where(jnp.isnan(total), jnp.nan, whole), total, weighted, chosen


def _gradient_kernel(behind_ref, logits_ref, id_ref, slopes_ref, gradient_ref, *, tiling, bits):
    V, first = tiling.shape[-1], pl.program_id(2) * tiling.block_vocab
    tile = _Tile(tiling, logits_ref, first, V - behind_ref[0] - first)
    home = tile.home(id_ref)
    logsumexp, shared, entropy, chosen = (
        jnp.broadcast_to(slopes_ref[tiling.at(k, 1)], home.shape) for k in range(4)
    )

    def store(_, number, x):
        log_p = (x.astype(jnp.float32) - logsumexp) * bits
        value = jnp.exp2(log_p) * (shared - entropy * jnp.maximum(log_p, LEAST_BITS))
        value = jnp.where(home == number, value + chosen, value)
        gradient_ref[tile.slab(number)] = value.astype(gradient_ref.dtype)

    tile.mask_tail()
    tile.fold(store, None)
