"""Queries that are chunks of a row give what they give in the whole of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.packed_attention import ops
from tests.kernels.packed_attention.problems import (
    F32,
    IMPLS,
    ROWS,
    T,
    arrays,
    exact,
    rel_l2,
)

pytestmark = pytest.mark.slow

CHUNKS = {
    "one": ((130, 70),),
    "early and late": ((0, 75), (225, 75)),  # of the first of two devices
    "over borders of blocks": ((50, 40), (105, 40), (260, 40)),
    "all of the row": tuple((start, 60) for start in range(0, T, 60)),
}
"""(start, length) of each; borders of segments and blocks lie within and beside them."""


@functools.cache
def program(impl, **options):
    """(query, key, value, segment, d_out, starts) -> out and the three gradients, compiled."""
    run = functools.partial(IMPLS[impl], operand_dtype=F32, **options)

    def of(query, key, value, segment, d_out, start_C):
        attend = lambda *arrays: run(*arrays, segment, start_C=start_C)
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(d_out)

    return jax.jit(of)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"window": 130, "soft_cap": 2.0}], ids=str)
def test_value_and_gradient_are_the_part_of_the_whole(impl, chunks, options):
    query, key, value, segment, d_out = arrays()
    places = np.concatenate([np.arange(start, start + n) for start, n in CHUNKS[chunks]])
    start_C = jnp.asarray([start for start, _ in CHUNKS[chunks]], jnp.int32)
    mine = np.zeros(T, bool)
    mine[places] = True
    of_mine = jnp.where(mine[None, :, None, None], d_out, 0)
    truth = exact(query, key, value, segment, of_mine, **options)
    found = program(impl, **options)(
        query[:, places], key, value, segment, d_out[:, places], start_C
    )
    expected = (truth.out[:, places], truth.query[:, places], truth.key, truth.value)
    for name, actual, right in zip(truth._fields, found, expected, strict=True):
        # Sums of at most 300 terms of float32 in another order.
        assert rel_l2(actual, right) < 2e-6, name


@pytest.mark.parametrize(
    "start, message",
    [
        (jnp.zeros((1, 1), jnp.int32), r"start must be integers of shape \(C,\), got int32"),
        (jnp.zeros(2), r"start must be integers of shape \(C,\), got float32"),
        (jnp.zeros(3, jnp.int32), "40 queries must be 3 chunks of equal length"),
        (jnp.zeros(0, jnp.int32), "40 queries must be 0 chunks .* of at least one"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(start, message):
    query, key, value, segment, _ = arrays(rows=ROWS[:1])
    with pytest.raises(ValueError, match=message):
        ops.packed_attention(query[:, :40], key, value, segment, operand_dtype=F32, start_C=start)


def test_more_queries_than_tokens_are_refused():
    query, key, value, segment, _ = arrays(rows=ROWS[:1])
    with pytest.raises(ValueError, match="300 queries must be 2 chunks .* in a row of 200 tokens"):
        ops.packed_attention(
            query,
            key[:, :200],
            value[:, :200],
            segment[:, :200],
            operand_dtype=F32,
            start_C=jnp.zeros(2, jnp.int32),
        )
