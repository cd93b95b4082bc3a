"""Rows that pack sequences in every way that has borders, for the tests of this folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float64_attention
from kernels import choose
from kernels.packed_attention import pallas_tpu, reference, xla

T = 300
"""No multiple of a block."""
F32 = jnp.dtype("float32")
IMPLS = {
    choose.REFERENCE: reference.packed_attention,
    choose.XLA: functools.partial(xla.packed_attention, block_tokens=64),
    choose.PALLAS_INTERPRET: functools.partial(
        pallas_tpu.packed_attention, block_tokens=128, interpret=True
    ),
}
"""With blocks so small that a row has several."""


def segments(*lengths: int, tokens: int = T) -> list[int]:
    """A row of segments 1, 2, .. of these lengths, filled up with padding."""
    row = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return row + [0] * (tokens - len(row))


ROWS = np.array(
    [
        # Borders at a block's (64, 128), beside it, and of single tokens; padding at the end.
        segments(63, 1, 64, 1, 1, 70, 60),
        segments(300),
        segments(),
        # Numbers in no order, a segment in two parts, padding in the middle.
        [7] * 90 + [0] * 50 + [2] * 30 + [7] * 70 + [9] * 60,
    ],
    np.int32,
)


def arrays(*, rows=ROWS, N=4, K=2, H=16, dtype=F32, seed=0):
    """Random query, key, value and cotangent beside the segments."""
    rng = np.random.default_rng(seed)
    B, tokens = rows.shape
    normal = lambda heads: jnp.asarray(rng.normal(0, 1, (B, tokens, heads, H)), dtype)
    return normal(N), normal(K), normal(K), jnp.asarray(rows), normal(N)


@functools.cache
def program(impl, operand_dtype=F32, **options):
    """(query, key, value, segment, d_out) -> out and the three gradients, compiled."""
    run = functools.partial(IMPLS[impl], operand_dtype=operand_dtype, **options)

    def of(query, key, value, segment, d_out):
        out, pull = jax.vjp(lambda *arrays: run(*arrays, segment), query, key, value)
        return float64_attention.AttentionGradients(out, *pull(d_out))

    return jax.jit(of)


def exact(query, key, value, segment, d_out, **options):
    """The same in float64."""
    given = (np.asarray(each) for each in (query, key, value, segment, d_out))
    return float64_attention.value_and_gradients(*given, **options)


def rel_l2(actual, expected):
    """Norm of the difference over that of the truth."""
    actual = np.asarray(actual).astype(np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)
