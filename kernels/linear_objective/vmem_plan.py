"""What the head's TPU kernels have in common: how much fits, and how it is cut and streamed.

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
"""For what is planned here, of the 128 MiB of a v6e core."""
VMEM_LIMIT_BYTES = 116 * 2**20
"""With what the compiler needs beside it."""
CHUNK_TOKENS = 2048
"""At these many the matrix products outlast the traffic of the head's float32 gradient."""
CHUNK_BYTES = 16 * 2**20
"""Bound on the chunk of hidden: it stays in fast memory beside its gradient."""
TILE_ROWS = (512, 256, 128, 64, 32, 16)
"""Rows of the head in a tile, the first that fits: fewer leave the matrix unit waiting."""
EXACT_TOKENS = 512
"""Tokens that a product of float32 is at most planned to hold taken apart."""
LANES = 128
"""Tokens are padded to whole lanes, so that every part of them is aligned."""
NOWHERE = -(2**30)
"""Place of an id that is not among the rows, even when tiles are counted from -1."""


def chunk_tokens(D: int, dtype: jnp.dtype) -> int:
    """Tokens of a chunk of hidden states [.., D]: as many as fit beside the tiles, in lanes."""
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
    # A product of float32 takes each operand apart into three of 16 bits.
    apart = 6 if item == 4 else 0
    resident = C * D * (item + 4) + min(C, EXACT_TOKENS) * D * apart
    # What streams by is there twice: head_grad in and out, the head (lean: two tiles of it) and
    # what was kept of the logits (fast); their gradient is there four times.
    fast_row = D * (2 * head_item + 16) + C * 6 * item
    lean_row = D * (4 * head_item + 16 + apart) + C * 4 * item
    for rows in TILE_ROWS:
        if resident + rows * max(fast_row, lean_row) <= VMEM_BYTES:
            return rows
    raise ValueError(
        f"a chunk of {C} tokens of width {D} in {hidden_CD.dtype} does not fit the fast memory of "
        f"a TPU: take fewer chunk_tokens, at most {chunk_tokens(D, hidden_CD.dtype)} by default"
    )


def part_size(whole, at_most):
    """The largest part that divides the whole into equal parts in lanes; else the whole."""
    sizes = [size for size in range(LANES, at_most + 1, LANES) if whole % size == 0]
    return sizes[-1] if sizes else whole


def lanes_at(start, size):
    """A slice of whole lanes, wherever it starts."""
    return pl.ds(pl.multiple_of(start, LANES), size)


def repeat(count, body):
    """A loop in the kernel: unrolled, the products would fill the instruction memory."""
    jax.lax.fori_loop(0, count, lambda i, _: body(i) or 0, 0)


def product(left, right, contract):
    """The matrix product over these axes, in float32; operands of float32 are taken as such."""
    exact = left.dtype == jnp.float32
    return jax.lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def resident(shape):
    """A whole array that stays in fast memory, once."""
    return pl.BlockSpec(shape, lambda n, _: (0,) * len(shape), pipeline_mode=pl.Buffered(1))


def streamed(shape, tile_of):
    """Blocks along the first axis, of which step n of the grid sees number tile_of(n)."""
    return pl.BlockSpec(shape, lambda n, _: (tile_of(n), *(0,) * (len(shape) - 1)))


def before(n):
    """The tile that the step before this one began."""
    return jnp.maximum(n - 1, 0)


def clipped(N):
    """The tile that a step begins; the step after the last tile begins none."""
    return lambda n: jnp.minimum(n, N - 1)


def pad_tokens(array, value):
    """Whole lanes of tokens along the first axis."""
    rest = -array.shape[0] % LANES
    return jnp.pad(array, [(0, rest)] + [(0, 0)] * (array.ndim - 1), constant_values=value)


def supported_rows(V, support, first_column):
    """How many of these V rows are in the support, int32 [1]."""
    return jnp.clip(jnp.asarray(support.columns - first_column, jnp.int32), 0, V).reshape(1)


def local_ids(ids_C, first_column, V):
    """The ids numbered from the first of these rows, int32 [1, C]; NOWHERE if not among them."""
    local_C = ids_C.astype(jnp.int32) - first_column
    local_C = jnp.where((local_C >= 0) & (local_C < V), local_C, NOWHERE)
    return pad_tokens(local_C, NOWHERE)[None, :]


def compiler_params():
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES
    )


def cost_estimate(hidden_CD, head_VD, *, products, out_shape, beside=None):
    """What the compiler is told of a call: it schedules by these, and measures nothing."""
    (C, D), V = hidden_CD.shape, head_VD.shape[0]
    arrays = [hidden_CD, head_VD, *out_shape, *jax.tree.leaves(beside)]
    return pl.CostEstimate(
        flops=2 * products * C * D * V,
        transcendentals=C * V,
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
    )
