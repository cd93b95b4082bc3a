"""What the head's TPU kernels have in common: how much fits VMEM, and how it is cut and streamed.

VMEM is the fast memory of a TPU core; everything that a kernel computes with lies in it. What
limits the sizes: a chunk of hidden states [C, D] and its float32 gradient stay there for a whole
pass, and beside them two buffers of everything that streams, one in use and one arriving.

Dimension key:
    C: tokens of the chunk
    D: model width
    V: rows of the head given, which may be a part of the vocabulary
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

VMEM_BYTES = 108 * 2**20
"""Of the 128 MiB of a v6e core, for what is planned here."""
VMEM_LIMIT_BYTES = 116 * 2**20
"""That and what the compiler needs besides, such as spilled registers."""
CHUNK_TOKENS = 2048
"""At this size the matrix products take longer than reading and writing the head's gradient."""
CHUNK_BYTES = 16 * 2**20
"""Bound on the chunk of hidden states, which stays in VMEM beside its gradient."""
TILE_ROWS = (512, 256, 128, 64, 32, 16)
"""Rows of the head in a tile, the first that fits: with fewer the matrix unit waits more."""
EXACT_TOKENS = 512
"""A product of float32 splits its operands into parts of 16 bits; planned for so many tokens."""
LANES = 128
"""Width of a vector register. Tokens are padded to a multiple, so that every part is aligned."""
NOWHERE = -(2**30)
"""Row number of an id that is not among the rows; no row has it, also when tiles begin at -1."""


def chunk_tokens(D: int, dtype: jnp.dtype) -> int:
    """Tokens of a chunk of hidden states [.., D]: as many as fit, in multiples of LANES."""
    return max(LANES, min(CHUNK_TOKENS, CHUNK_BYTES // (dtype.itemsize * D) // LANES * LANES))


def fitting_rows(
    hidden_CD: jax.Array | jax.ShapeDtypeStruct, head_VD: jax.Array | jax.ShapeDtypeStruct
) -> int:
    """Rows of a tile such that the gradient, which needs more than the score, fits.

    Raises:
        ValueError: if no tile does.
    """
    C, D = hidden_CD.shape
    item, head_item = hidden_CD.dtype.itemsize, head_VD.dtype.itemsize
    # A product of float32 splits each operand into three of 16 bits.
    apart = 6 if item == 4 else 0
    resident = C * D * (item + 4) + min(C, EXACT_TOKENS) * D * apart
    # Per row of a tile. What streams has two buffers: head_grad in and out (2 * 2 * 4 bytes), the
    # head (`lean` reads two tiles of it), the kept logits (`fast`). The gradient of the logits has
    # four scratch tiles.
    fast_row = D * (2 * head_item + 16) + C * 6 * item
    lean_row = D * (4 * head_item + 16 + apart) + C * 4 * item
    for rows in TILE_ROWS:
        if resident + rows * max(fast_row, lean_row) <= VMEM_BYTES:
            return rows
    raise ValueError(
        f"a chunk of {C} tokens of width {D} in {hidden_CD.dtype} does not fit the fast memory of "
        f"a TPU: use fewer chunk_tokens, at most {chunk_tokens(D, hidden_CD.dtype)} by default"
    )


def part_size(whole, at_most):
    """The largest multiple of LANES that divides the whole and is in bounds; else the whole."""
    sizes = [size for size in range(LANES, at_most + 1, LANES) if whole % size == 0]
    return sizes[-1] if sizes else whole


def lanes_at(start, size):
    """A slice that starts at a multiple of LANES, which the compiler is told."""
    return pl.ds(pl.multiple_of(start, LANES), size)


def repeat(count, body):
    """body(i) for i < count, as a loop: unrolled, it would not fit the instruction memory."""
    jax.lax.fori_loop(0, count, lambda i, _: body(i) or 0, 0)


def product(left, right, contract):
    """Matrix product over these axes, summed in float32; float32 operands are not rounded."""
    exact = left.dtype == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def resident(shape):
    """A whole array that stays in VMEM for all steps of the grid, with one buffer.

    Its block index never changes, so an input is copied in once and an output copied out once.
    """
    return pl.BlockSpec(shape, lambda n, _: (0,) * len(shape), pipeline_mode=pl.Buffered(1))


def streamed(shape, tile_of):
    """Blocks along the first axis; step n of the grid has block number tile_of(n) in VMEM.

    Two buffers: the next block arrives while this one is used. An output block is copied to HBM
    when the number changes.
    """
    return pl.BlockSpec(shape, lambda n, _: (tile_of(n), *(0,) * (len(shape) - 1)))


def before(n):
    """Tile n - 1, which the step before has begun; step 0 has tile 0 as well."""
    return jnp.maximum(n - 1, 0)


def clipped(N):
    """Tile n; the step after the last tile has that one again and does not use it."""
    return lambda n: jnp.minimum(n, N - 1)


def pad_tokens(array, value):
    """The array padded to a multiple of LANES along the first axis."""
    rest = -array.shape[0] % LANES
    return jnp.pad(array, [(0, rest)] + [(0, 0)] * (array.ndim - 1), constant_values=value)


def supported_rows(V, support, first_column):
    """The number of these V rows that are in the support, int32 [1]."""
    return jnp.clip(jnp.asarray(support.columns - first_column, jnp.int32), 0, V).reshape(1)


def local_ids(ids_C, first_column, V):
    """Ids counted from the first of these rows, int32 [1, C]; NOWHERE if not among them."""
    local_C = ids_C.astype(jnp.int32) - first_column
    local_C = jnp.where((local_C >= 0) & (local_C < V), local_C, NOWHERE)
    return pad_tokens(local_C, NOWHERE)[None, :]


def compiler_params():
    """Grid steps run in order, since they carry state; and the VMEM limit."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES
    )


def cost_estimate(hidden_CD, head_VD, *, products, out_shape, beside=None):
    """Cost of a call for XLA, which schedules by these numbers."""
    (C, D), V = hidden_CD.shape, head_VD.shape[0]
    arrays = [hidden_CD, head_VD, *out_shape, *jax.tree.leaves(beside)]
    return pl.CostEstimate(
        flops=2 * products * C * D * V,
        transcendentals=C * V,
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
    )
