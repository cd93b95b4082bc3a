"""The head's two passes over one chunk of tokens, as TPU kernels.

`score` multiplies hidden states with the head and folds the logits into statistics of each token;
`gradient` turns the logits into their gradient and multiplies that back, twice. Neither writes the
logits to HBM (the large memory), except that `score` can keep them for `gradient`.

**Grid.** The tokens of the chunk stay in VMEM (the fast memory) and the head streams past in N
tiles of rows: the head is the largest array by far and is read once a pass. The grid is (N + 1,),
run in order. Step n does two things that do not depend on each other, so that the matrix unit works
on one while the vector unit works on the other:

    score      multiplies tile n            | folds tile n - 1 into the statistics
    gradient   forms the gradient of tile n | multiplies that of tile n - 1 back

Hence one step more than tiles, the index maps `clipped` (tile n) and `before` (tile n - 1) of
vmem_plan.py, and a scratch tile that carries the result of step n to step n + 1. Step 0 has no tile
before it: it works on a scratch tile that it has filled so that nothing comes of it (logits of
-inf, gradients of 0), and what it stores for tile 0 stays in VMEM, where step 1 overwrites it.

**A tile of logits** is [rows of the head, tokens]: sums over the vocabulary are sums over sublanes,
which cost almost nothing, and what belongs to a token is one row of lanes.

**In VMEM for the whole pass** (`resident`, one buffer): ids, hidden [C, D], slopes [4, C]; and
the outputs that all steps add to: statistics [4, C], or the gradient of hidden [C, D]. Such an
output goes to HBM once, after the last step. **For one step** (`streamed`, two buffers, the next
one arrives while this one is used): tiles of the head, of its gradient and of what was kept. A tile
of the head's gradient is read and written by the one step that owns it, in place.

**Numerics.** Operands of the products have the dtype of hidden; products, exponentials and sums are
float32. The kept logits are stored in the dtype of hidden less the top of their tile: in 16 bits
that is precise where the probability is. A log-probability of -inf is replaced by -1e30 where it is
a factor, since 0 * -inf is NaN.

**Sizes.** `vmem_plan.py` chooses tokens of a chunk and rows of a tile such that all of it fits.

Dimension key:
    C: tokens of the chunk
    D: model width
    V: rows of the head given, which may be a part of the vocabulary
    N: tiles of head rows
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.linear_objective import vmem_plan as plan
from kernels.linear_objective.vmem_plan import chunk_tokens
from kernels.token_logprob.statistics import Slopes, Statistics, Support

__all__ = ["KeptTiles", "chunk_tokens", "gradient", "score"]

SCORE_TOKENS = 1024
"""Tokens of a tile that `score` works on at a time: more would spill more registers."""
COLUMNS = 1024
"""Columns of D that the two products of `gradient` form at a time."""
LOWEST = -1e30
"""Stands for -inf where it is multiplied by zero."""


class KeptTiles(NamedTuple):
    """The logits of one chunk as `gradient` takes them."""

    shifted_VC: jax.Array
    """z less the top of its tile, in the dtype of hidden; -inf outside the support."""
    top_N1C: jax.Array
    """The largest z of each tile, float32; 0 where the tile has no support."""


def score(
    hidden_CD: jax.Array,
    head_VD: jax.Array,
    ids_C: jax.Array,
    support: Support,
    *,
    first_column: jax.Array | int = 0,
    keep: bool,
    interpret: bool = False,
    tile_rows: int | None = None,
) -> tuple[Statistics, KeptTiles | None]:
    """Same contract as xla.score.

    Args:
        tile_rows: rows of the head in a tile, a multiple of 16; None for as many as VMEM takes.

    Raises:
        ValueError: if the tokens do not fit VMEM.
    """
    (C, D), V = hidden_CD.shape, head_VD.shape[0]
    hidden_CD = plan.pad_tokens(hidden_CD, 0)
    tile = min(tile_rows or plan.fitting_rows(hidden_CD, head_VD), V)
    N = pl.cdiv(V, tile)
    padded = hidden_CD.shape[0]
    out_shape = [jax.ShapeDtypeStruct((4, padded), jnp.float32)]
    out_specs = [plan.resident((4, padded))]
    if keep:
        out_shape += [
            jax.ShapeDtypeStruct((V, padded), hidden_CD.dtype),
            jax.ShapeDtypeStruct((N, 1, padded), jnp.float32),
        ]
        out_specs += [
            plan.streamed((tile, padded), plan.before),
            plan.streamed((1, 1, padded), plan.before),
        ]
    found, *kept = pl.pallas_call(
        functools.partial(_score_kernel, scale=1.0 / support.temperature),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N + 1,),
            in_specs=[
                plan.resident((1, padded)),
                plan.resident((padded, D)),
                plan.streamed((tile, D), plan.clipped(N)),
            ],
            out_specs=out_specs,
            # Logits before the temperature, from the step that multiplies to the one that folds.
            scratch_shapes=[pltpu.VMEM((tile, padded), jnp.float32)],
        ),
        out_shape=out_shape,
        compiler_params=plan.compiler_params(),
        cost_estimate=plan.cost_estimate(hidden_CD, head_VD, products=1, out_shape=out_shape),
        interpret=interpret,
        name="linear_objective_score",
    )(
        plan.supported_rows(V, support, first_column),
        plan.local_ids(ids_C, first_column, V),
        hidden_CD,
        head_VD,
    )
    return Statistics(*found[:, :C]), KeptTiles(*kept) if keep else None


def gradient(
    hidden_CD: jax.Array,
    head_VD: jax.Array,
    ids_C: jax.Array,
    slopes: Slopes,
    support: Support,
    head_grad_VD: jax.Array,
    kept: KeptTiles | None,
    *,
    first_column: jax.Array | int = 0,
    interpret: bool = False,
    tile_rows: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Same contract as xla.gradient; head_grad is added to in place.

    Args:
        tile_rows: as `score` had it, if kept is given.

    Raises:
        ValueError: as score.
    """
    (C, D), V = hidden_CD.shape, head_VD.shape[0]
    hidden_CD = plan.pad_tokens(hidden_CD, 0)
    tile = min(tile_rows or plan.fitting_rows(hidden_CD, head_VD), V)
    N = pl.cdiv(V, tile)
    slopes_4C = plan.pad_tokens(jnp.stack(slopes, axis=1), 0).T
    padded = hidden_CD.shape[0]
    if kept is None:
        source, source_specs = (head_VD,), [plan.streamed((tile, D), plan.clipped(N))]
    else:
        source = kept
        source_specs = [
            plan.streamed((tile, padded), plan.clipped(N)),
            plan.streamed((1, 1, padded), plan.clipped(N)),
        ]
    out_shape = [
        jax.ShapeDtypeStruct((padded, D), jnp.float32),
        jax.ShapeDtypeStruct((V, D), jnp.float32),
    ]
    local_1C = plan.local_ids(ids_C, first_column, V)
    d_logits = pltpu.VMEM((tile, padded), hidden_CD.dtype)
    d_logits_turned = pltpu.VMEM((padded, tile), hidden_CD.dtype)
    d_hidden_CD, head_grad_VD = pl.pallas_call(
        functools.partial(
            _gradient_kernel, scale=1.0 / support.temperature, rows=V, recompute=kept is None
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N + 1,),
            in_specs=[
                plan.resident((1, padded)),
                plan.resident((4, padded)),
                plan.resident((padded, D)),
                plan.streamed((tile, D), plan.before),
                plan.streamed((tile, D), plan.before),
                *source_specs,
            ],
            out_specs=[plan.resident((padded, D)), plan.streamed((tile, D), plan.before)],
            # The gradient of the logits of tiles n and n - 1, as they are and transposed.
            scratch_shapes=[d_logits, d_logits, d_logits_turned, d_logits_turned],
        ),
        out_shape=out_shape,
        input_output_aliases={5: 1},  # head_grad_VD, counted with the scalar, is output 1
        compiler_params=plan.compiler_params(),
        cost_estimate=plan.cost_estimate(
            hidden_CD, head_VD, products=2 + (kept is None), out_shape=out_shape, beside=source
        ),
        interpret=interpret,
        name="linear_objective_gradient",
    )(
        plan.supported_rows(V, support, first_column),
        local_1C,
        slopes_4C,
        hidden_CD,
        head_VD,
        head_grad_VD,
        *source,
    )
    return d_hidden_CD[:C], head_grad_VD


def _score_kernel(supported_ref, ids_ref, hidden_ref, head_ref, stats_ref, *refs, scale):
    """Step n multiplies tile n into z and folds tile n - 1, which z held, into the statistics."""
    *kept_refs, z_ref = refs
    tile, tokens = z_ref.shape
    first_row = (pl.program_id(0) - 1) * tile

    @pl.when(pl.program_id(0) == 0)
    def _():
        stats_ref[...] = jnp.zeros_like(stats_ref)
        stats_ref[0:1] = jnp.full_like(stats_ref[0:1], -jnp.inf)
        z_ref[...] = jnp.full_like(z_ref, -jnp.inf)

    def part(at):
        z = z_ref[:, at] * scale
        row = jax.lax.broadcasted_iota(jnp.int32, z.shape, 0) + first_row
        z = jnp.where(row < supported_ref[0], z, -jnp.inf)
        tile_top = z.max(axis=0, keepdims=True)
        # A column of -inf has no largest entry to subtract: any finite number gives exp(-inf) = 0.
        base = jnp.where(tile_top == -jnp.inf, 0.0, tile_top)
        shifted = z - base
        weight = jnp.exp(shifted)
        total = weight.sum(axis=0, keepdims=True)
        weighted = (weight * jnp.maximum(shifted, LOWEST)).sum(axis=0, keepdims=True)
        chosen = jnp.where(row == ids_ref[:, at], z, 0.0).sum(axis=0, keepdims=True)
        _fold(stats_ref, at, tile_top, total, weighted, chosen)
        if kept_refs:
            shifted_ref, top_ref = kept_refs
            shifted_ref[:, at] = shifted.astype(shifted_ref.dtype)
            top_ref[0, :, at] = base
        # Last, since z held the logits of the tile before until here.
        z_ref[:, at] = plan.product(head_ref[...].astype(hidden_ref.dtype), hidden_ref[at], (1, 1))

    size = plan.part_size(tokens, SCORE_TOKENS)
    plan.repeat(tokens // size, lambda i: part(plan.lanes_at(i * size, size)))


def _fold(stats_ref, at, tile_top, total, weighted, chosen):
    """Merges a tile into the running statistics, as statistics.merge does.

    Rows of stats: top, total, weighted, chosen. Sums are relative to a top; a higher one scales
    those so far down by exp(old top - new top).
    """
    old_top = stats_ref[0:1, at]
    top = jnp.maximum(old_top, tile_top)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    old_drop = jnp.maximum(old_top - base, LOWEST)
    drop = jnp.maximum(tile_top - base, LOWEST)
    old_factor, factor = jnp.exp(old_drop), jnp.exp(drop)
    old_total = stats_ref[1:2, at]
    stats_ref[0:1, at] = top
    stats_ref[1:2, at] = old_factor * old_total + factor * total
    stats_ref[2:3, at] = old_factor * (stats_ref[2:3, at] + old_drop * old_total) + factor * (
        weighted + drop * total
    )
    stats_ref[3:4, at] += chosen


def _gradient_kernel(
    supported_ref,
    ids_ref,
    slopes_ref,
    hidden_ref,
    head_ref,
    head_grad_in_ref,
    *refs,
    scale,
    rows,
    recompute,
):
    """Step n forms the gradient of the logits of tile n and multiplies that of tile n - 1 back.

    `next` holds the former [tile, tokens], `now` the latter; `turned` is transposed, so that both
    products contract the last axis of one operand with the first of the other.
    """
    (
        *source_refs,
        d_hidden_ref,
        head_grad_ref,
        next_ref,
        now_ref,
        next_turned_ref,
        now_turned_ref,
    ) = refs
    n = pl.program_id(0)
    tile, tokens = next_ref.shape
    D = hidden_ref.shape[1]

    @pl.when(n == 0)
    def _():
        d_hidden_ref[...] = jnp.zeros_like(d_hidden_ref)
        next_ref[...] = jnp.zeros_like(next_ref)
        next_turned_ref[...] = jnp.zeros_like(next_turned_ref)

    if rows % tile:

        @pl.when(n == rows // tile + 1)
        def _():
            # Rows of the last tile beyond the head may hold NaN. Their gradient is 0, but the
            # product sums over them, and 0 * NaN is NaN.
            head_ref[rows % tile :] = jnp.zeros_like(head_ref[rows % tile :])

    now_ref[...] = next_ref[...]
    now_turned_ref[...] = next_turned_ref[...]

    def log_probability(at):
        """Of tile n, float32: from what was kept, or multiplied again."""
        logsumexp = slopes_ref[0:1, at]
        if recompute:
            return (
                plan.product(source_refs[0][...].astype(hidden_ref.dtype), hidden_ref[at], (1, 1))
                * scale
                - logsumexp
            )
        shifted_ref, top_ref = source_refs
        return shifted_ref[:, at].astype(jnp.float32) + (top_ref[0, :, at] - logsumexp)

    def differentiate(at):
        """The gradient of the logits of tile n for some tokens; Slopes has the formula."""
        log_p = log_probability(at)
        row = jax.lax.broadcasted_iota(jnp.int32, log_p.shape, 0) + n * tile
        log_p = jnp.where(row < supported_ref[0], log_p, LOWEST)
        log_p = jnp.maximum(log_p, LOWEST)
        d_logits = jnp.exp(log_p) * (slopes_ref[1:2, at] - slopes_ref[2:3, at] * log_p)
        d_logits += jnp.where(row == ids_ref[:, at], slopes_ref[3:4, at], 0.0)
        d_logits = d_logits.astype(next_ref.dtype)
        next_ref[:, at] = d_logits
        next_turned_ref[at] = d_logits.T

    def multiply(at):
        """Both products of tile n - 1, for some columns of D."""
        d_hidden_ref[:, at] += plan.product(
            now_turned_ref[...], head_ref[:, at].astype(hidden_ref.dtype), (1, 0)
        )
        head_grad_ref[:, at] = head_grad_in_ref[:, at] + plan.product(
            now_ref[...], hidden_ref[:, at], (1, 0)
        )

    # As many parts of tokens as of columns, one of each in a round, so that every round has work
    # for the vector unit and for the matrix unit.
    width = plan.part_size(D, COLUMNS)
    count = D // width
    size = plan.LANES * pl.cdiv(tokens // plan.LANES, count)

    def body(i):
        # The last parts of the tokens may overlap: what is computed twice has the same result.
        differentiate(plan.lanes_at(jnp.minimum(i * size, tokens - size), size))
        multiply(plan.lanes_at(i * width, width))

    plan.repeat(count, body)
