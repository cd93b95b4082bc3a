"""The head's two passes over one chunk of tokens, as TPU kernels.

The tokens of the chunk stay in fast memory and the head streams past in tiles of rows. A tile of
logits is [rows of the head, tokens]: sums over the vocabulary are sums over sublanes, which cost
almost nothing, and what belongs to a token is a row of lanes. `score` folds each tile into running
statistics; `gradient` turns it into its gradient and multiplies it back, twice. Neither writes the
logits, except that `score` can keep them, each less the top of its tile: in 16 bits that is
precise where the probability is.

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

from kernels.token_logprob.statistics import Slopes, Statistics, Support

VMEM_BYTES = 108 * 2**20
"""For what is planned here, of the 128 MiB of a v6e core."""
VMEM_LIMIT_BYTES = 116 * 2**20
"""With what the compiler needs beside it."""
CHUNK_TOKENS = 2048
"""At these many the matrix products outlast the traffic of the head's float32 gradient."""
CHUNK_BYTES = 16 * 2**20
"""Bound on the chunk of hidden, in 16 bits: it stays in fast memory beside its gradient."""
TILE_ROWS = (512, 256, 128, 64, 32, 16)
"""Rows of the head in a tile, the first that fits: fewer leave the matrix unit waiting."""
LANES = 128
SCORE_TOKENS = 1024
"""Tokens of a tile multiplied at a time."""
COLUMNS = 1024
"""Columns of the two products of the gradient formed at a time."""
NOWHERE = -(2**30)
"""Place of an id that is not among the rows, even when tiles are counted from -1."""
LOWEST = -1e30
"""Stands for -inf where it is multiplied by a zero."""


class Kept(NamedTuple):
    """The logits of one chunk as `gradient` takes them."""

    shifted_VC: jax.Array
    """z less the top of its tile, in the dtype of hidden; -inf outside the support."""
    top_N1C: jax.Array
    """The largest z of each tile, float32; 0 where the tile has no support."""


def chunk_tokens(V: int, D: int) -> int:
    """Tokens of a chunk for a head [V, D]: as many as fit beside the tiles, in lanes."""
    return max(128, min(CHUNK_TOKENS, CHUNK_BYTES // (2 * D) // 128 * 128))


def fitting_rows(hidden_CD: jax.Array, head_VD: jax.Array) -> int:
    """Rows of a tile such that the gradient, which needs more than the score, fits.

    Raises:
        ValueError: if no tile does.
    """
    C, D = hidden_CD.shape
    item, head_item = hidden_CD.dtype.itemsize, head_VD.dtype.itemsize
    resident = C * D * (item + 4)
    # What streams by is there twice: head_grad in and out, the head (lean: two tiles of it) and
    # what was kept of the logits (fast); their gradient is there four times.
    fast_row = D * (2 * head_item + 16) + C * 6 * item
    lean_row = D * (4 * head_item + 16) + C * 4 * item
    for rows in TILE_ROWS:
        if resident + rows * max(fast_row, lean_row) <= VMEM_BYTES:
            return rows
    raise ValueError(
        f"a chunk of {C} tokens of width {D} in {hidden_CD.dtype} does not fit the fast memory of "
        f"a TPU: take at most {chunk_tokens(head_VD.shape[0], D)} chunk_tokens"
    )


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
) -> tuple[Statistics, Kept | None]:
    """Same contract as xla.score.

    Args:
        tile_rows: rows of the head worked on at a time, a multiple of 16; None for as many as
            fast memory takes.

    Raises:
        ValueError: if fast memory does not take so many tokens.
    """
    (C, D), V = hidden_CD.shape, head_VD.shape[0]
    hidden_CD = _pad_tokens(hidden_CD, 0)
    tile = min(tile_rows or fitting_rows(hidden_CD, head_VD), V)
    N = pl.cdiv(V, tile)
    padded = hidden_CD.shape[0]
    out_shape = [jax.ShapeDtypeStruct((4, padded), jnp.float32)]
    out_specs = [_resident((4, padded))]
    if keep:
        out_shape += [
            jax.ShapeDtypeStruct((V, padded), hidden_CD.dtype),
            jax.ShapeDtypeStruct((N, 1, padded), jnp.float32),
        ]
        out_specs += [_tiles((tile, padded), _before), _tiles((1, 1, padded), _before)]
    found, *kept = pl.pallas_call(
        functools.partial(_score_kernel, scale=1.0 / support.temperature),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N + 1,),
            in_specs=[
                _resident((1, padded)),
                _resident((padded, D)),
                _tiles((tile, D), _at_most(N)),
            ],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((tile, padded), jnp.float32)],
        ),
        out_shape=out_shape,
        compiler_params=_params(),
        cost_estimate=_cost(hidden_CD, head_VD, products=1, out_shape=out_shape),
        interpret=interpret,
        name="linear_objective_score",
    )(_supported(V, support, first_column), _local(ids_C, first_column, V), hidden_CD, head_VD)
    return Statistics(*found[:, :C]), Kept(*kept) if keep else None


def gradient(
    hidden_CD: jax.Array,
    head_VD: jax.Array,
    ids_C: jax.Array,
    slopes: Slopes,
    support: Support,
    head_grad_VD: jax.Array,
    kept: Kept | None,
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
    hidden_CD = _pad_tokens(hidden_CD, 0)
    tile = min(tile_rows or fitting_rows(hidden_CD, head_VD), V)
    N = pl.cdiv(V, tile)
    slopes_4C = _pad_tokens(jnp.stack(slopes, axis=1), 0).T
    padded = hidden_CD.shape[0]
    if kept is None:
        source, source_specs = (head_VD,), [_tiles((tile, D), _at_most(N))]
    else:
        source = kept
        source_specs = [_tiles((tile, padded), _at_most(N)), _tiles((1, 1, padded), _at_most(N))]
    out_shape = [
        jax.ShapeDtypeStruct((padded, D), jnp.float32),
        jax.ShapeDtypeStruct((V, D), jnp.float32),
    ]
    local_1C = _local(ids_C, first_column, V)
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
                _resident((1, padded)),
                _resident((4, padded)),
                _resident((padded, D)),
                _tiles((tile, D), _before),
                _tiles((tile, D), _before),
                *source_specs,
            ],
            out_specs=[_resident((padded, D)), _tiles((tile, D), _before)],
            scratch_shapes=[d_logits, d_logits, d_logits_turned, d_logits_turned],
        ),
        out_shape=out_shape,
        input_output_aliases={5: 1},
        compiler_params=_params(),
        cost_estimate=_cost(
            hidden_CD, head_VD, products=2 + (kept is None), out_shape=out_shape, beside=source
        ),
        interpret=interpret,
        name="linear_objective_gradient",
    )(
        _supported(V, support, first_column),
        local_1C,
        slopes_4C,
        hidden_CD,
        head_VD,
        head_grad_VD,
        *source,
    )
    return d_hidden_CD[:C], head_grad_VD


def _score_kernel(supported_ref, ids_ref, hidden_ref, head_ref, stats_ref, *refs, scale):
    """Step n multiplies tile n and folds tile n - 1 into the statistics, each beside the other."""
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
        z_ref[:, at] = _product(head_ref[...].astype(hidden_ref.dtype), hidden_ref[at], (1, 1))

    size = _part_size(tokens, SCORE_TOKENS)
    _loop(tokens // size, lambda i: part(_slice(i * size, size)))


def _fold(stats_ref, at, tile_top, total, weighted, chosen):
    """Merges a tile into the running statistics, as statistics.merge does."""
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
    """Step n forms the gradient of tile n and multiplies that of tile n - 1 back."""
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
            # What lies beyond the head may be anything, and is summed over.
            head_ref[rows % tile :] = jnp.zeros_like(head_ref[rows % tile :])

    now_ref[...] = next_ref[...]
    now_turned_ref[...] = next_turned_ref[...]

    def log_probability(at):
        logsumexp = slopes_ref[0:1, at]
        if recompute:
            return (
                _product(source_refs[0][...].astype(hidden_ref.dtype), hidden_ref[at], (1, 1))
                * scale
                - logsumexp
            )
        shifted_ref, top_ref = source_refs
        return shifted_ref[:, at].astype(jnp.float32) + (top_ref[0, :, at] - logsumexp)

    def differentiate(at):
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
        d_hidden_ref[:, at] += _product(
            now_turned_ref[...], head_ref[:, at].astype(hidden_ref.dtype), (1, 0)
        )
        head_grad_ref[:, at] = head_grad_in_ref[:, at] + _product(
            now_ref[...], hidden_ref[:, at], (1, 0)
        )

    width = _part_size(D, COLUMNS)
    count = D // width
    size = LANES * pl.cdiv(tokens // LANES, count)

    def body(i):
        # The last parts may overlap: what is formed twice is formed alike.
        differentiate(_slice(jnp.minimum(i * size, tokens - size), size))
        multiply(_slice(i * width, width))

    _loop(count, body)


def _part_size(whole, at_most):
    """The largest part that divides the whole into equal parts in lanes; else the whole."""
    sizes = [size for size in range(LANES, at_most + 1, LANES) if whole % size == 0]
    return sizes[-1] if sizes else whole


def _slice(start, size):
    return pl.ds(pl.multiple_of(start, LANES), size)


def _loop(count, body):
    jax.lax.fori_loop(0, count, lambda i, _: body(i) or 0, 0)


def _product(left, right, contract):
    """The matrix product over these axes, in float32; operands of float32 are taken as such."""
    exact = left.dtype == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _resident(shape):
    return pl.BlockSpec(shape, lambda n, _: (0,) * len(shape), pipeline_mode=pl.Buffered(1))


def _tiles(shape, tile_of):
    return pl.BlockSpec(shape, lambda n, _: (tile_of(n), *(0,) * (len(shape) - 1)))


def _before(n):
    return jnp.maximum(n - 1, 0)


def _at_most(N):
    return lambda n: jnp.minimum(n, N - 1)


def _pad_tokens(array, value):
    """Whole lanes of tokens along the first axis."""
    rest = -array.shape[0] % LANES
    return jnp.pad(array, [(0, rest)] + [(0, 0)] * (array.ndim - 1), constant_values=value)


def _supported(V, support, first_column):
    """How many of these V rows are in the support, int32 [1]."""
    return jnp.clip(jnp.asarray(support.columns - first_column, jnp.int32), 0, V).reshape(1)


def _local(ids_C, first_column, V):
    """The ids numbered from the first of these rows, int32 [1, C]; NOWHERE if not among them."""
    local_C = ids_C.astype(jnp.int32) - first_column
    local_C = jnp.where((local_C >= 0) & (local_C < V), local_C, NOWHERE)
    return _pad_tokens(local_C, NOWHERE)[None, :]


def _params():
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES
    )


def _cost(hidden_CD, head_VD, *, products, out_shape, beside=None):
    """What the compiler is told of a call: it schedules by these, and measures nothing."""
    (C, D), V = hidden_CD.shape, head_VD.shape[0]
    arrays = [hidden_CD, head_VD, *out_shape, *jax.tree.leaves(beside)]
    return pl.CostEstimate(
        flops=2 * products * C * D * V,
        transcendentals=C * V,
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
    )
