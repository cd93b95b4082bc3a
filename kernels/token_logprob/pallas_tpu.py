"""`token_logprob` as two TPU kernels: one streaming pass over the logits each.

The logits stay where they are: kernels see them through a view that `logits_tiling` chooses, and
walk each tile along the vocabulary in slabs of a few registers. Every place of a slab keeps
statistics of its own, so that no lane waits for another before the last tile, where those of a
token merge.

Inside, logits are as stored (x) and 1 / temperature and log2(e) are one factor of their difference
to the top, so that exp is exp2. Weighted sums and slopes of the entropy are in bits accordingly.

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
"""Room beside the tiles: what is per token, and registers that spill."""
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
            shape. Another than they have costs a copy.
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
    )(behind, tiling.look(logits_BTV), tiling.look(_collapse(local[..., None])))
    top, total, weighted, chosen = jnp.moveaxis(tiling.look_back(found).reshape(*leading, 4), -1, 0)
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
        tiling.look(logits_BTV),
        tiling.look(_collapse(local[..., None])),
        tiling.look(_collapse(per_token)),
    )
    return tiling.look_back(gradient).reshape(logits.shape)


def _collapse(array: jax.Array) -> jax.Array:
    """[.., T, V] as [B, T, V]; one token per sequence counts as one sequence of tokens."""
    *leading, V = array.shape
    T = leading[-1] if leading else 1
    return array.reshape((-1, T, V) if T > 1 else (1, -1, V))


def _bits(support: Support) -> float:
    """Bits per unit of a logit as stored."""
    return math.log2(math.e) / support.temperature


def _local(ids, V, support, first_column) -> tuple[jax.Array, jax.Array]:
    """int32 [1], how many of the V columns given lie behind the support; ids before it, else -1."""
    behind = jnp.clip(first_column + V - support.columns, 0, V).astype(jnp.int32)
    local = ids.astype(jnp.int32) - first_column
    return behind[None], jnp.where((local >= 0) & (local < V - behind), local, -1)


def _resources(tiling: Tiling, logits: jax.Array, *, passes: int) -> dict:
    """What XLA must know: passes over the logits' bytes, and the memory of tiles in flight."""
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
    """How many of its columns are in the support; may be none, or more than it has."""

    def column(self) -> jax.Array:
        """int32, of each place of a slab: number of its column in the slab."""
        tiling = self.tiling
        return jax.lax.broadcasted_iota(jnp.int32, tiling.tile(tiling.slab), tiling.vocab_axis)

    def slab(self, number) -> tuple:
        """Index of a slab in a reference to the tile."""
        slab = self.tiling.slab
        return self.tiling.at(pl.multiple_of(number * slab, slab), slab)

    def load(self, number) -> jax.Array:
        return self.logits_ref[self.slab(number)]

    def home(self, id_ref) -> jax.Array:
        """int32, of each place of a slab: number of the slab where it holds the id, else -1."""
        slab, slabs = self.tiling.slab, self.tiling.slabs
        start = id_ref[...] - self.first - self.column()
        number = start >> (slab.bit_length() - 1)
        held = (start & (slab - 1) == 0) & (number >= 0) & (number < slabs)
        return jnp.where(held, number, -1)

    def blank_the_tail(self):
        """Writes -inf over columns outside the support, undefined ones behind the array too."""
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
        """step(carry, number, slab) over all slabs."""
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

    tile.blank_the_tail()
    _accumulate(state_refs, tile, tile.home(id_ref), bits)

    @pl.when(place == pl.num_programs(2) - 1)
    def _():
        merged = _merge_places([ref[...] for ref in state_refs], tiling.vocab_axis, bits)
        for k, value in enumerate(merged):
            out_ref[tiling.at(k, 1)] = value


def _accumulate(state_refs, tile, home, bits):
    """Adds a tile to the statistics of each place: once for its top, once for the sums."""
    top_ref, total_ref, weighted_ref, chosen_ref = state_refs
    dtype = tile.logits_ref.dtype
    # Comparing numbers of the width of the logits takes half as many registers in bfloat16.
    home = home.astype(jnp.int16 if dtype.itemsize == 2 else jnp.int32)

    def look(found, number, x):
        largest, chosen = found
        here = home == jnp.asarray(number, home.dtype)
        return jnp.maximum(largest, x), jnp.where(here, x, chosen)

    nothing = jnp.full(home.shape, -jnp.inf, dtype), chosen_ref[...].astype(dtype)
    largest, chosen = tile.fold(look, nothing)
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
    """Statistics of each token from those of its places, which lie along an axis."""
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

    tile.blank_the_tail()
    tile.fold(store, None)
