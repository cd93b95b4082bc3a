"""Decode attention against its definition: both implementations, every shape of a step.

Tolerances: float32 implementations order sums differently, which over these sizes gives errors of
a few 1e-7 relative to values of order one; 2e-6 bounds them. bfloat16 operands round with relative
error 2**-9; its own bound stands with its test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import choose
from kernels.decode_attention import ops

pytestmark = pytest.mark.slow

IMPLS = [choose.XLA, choose.PALLAS_INTERPRET]
F32 = jnp.float32
TIGHT = dict(rtol=2e-6, atol=2e-6)


def problem(*, B=5, N=2, K=1, S=48, H=16, dtype=F32, position=None, seed=0):
    """Random arguments; the positions are ragged and have both ends of the cache."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    if position is None:
        position = [0, S - 1, *rng.integers(1, S - 1, B)][:B]
    return (
        *(normal(B, N, H), normal(B, K, H), normal(B, K, H)),
        *(normal(B, K, S, H), normal(B, K, S, H)),
        jnp.asarray(position, jnp.int32),
    )


@functools.cache
def program(impl, operand_dtype):
    """Compiled once for the same shapes: that is what an interpreted kernel takes its time for."""
    run = functools.partial(ops.decode_attention, impl=impl, operand_dtype=operand_dtype)
    return jax.jit(run)


def attend(arguments, impl, operand_dtype=F32):
    return program(impl, operand_dtype)(*arguments)


def assert_same(actual, expected, **tolerance):
    """Outputs within the tolerance, caches bit for bit."""
    np.testing.assert_allclose(actual.out_BNH, expected.out_BNH, **tolerance)
    for name in ("key_BKSH", "value_BKSH"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))


def literal(arguments):
    """One query at a time, in float64."""
    query, new_key, new_value, key, value, position = (np.array(x, np.float64) for x in arguments)
    out = np.empty_like(query)
    for b, n in np.ndindex(query.shape[:2]):
        k, last = n // (query.shape[1] // key.shape[1]), int(position[b])
        key[b, k, last], value[b, k, last] = new_key[b, k], new_value[b, k]
        score = key[b, k, : last + 1] @ query[b, n] / np.sqrt(query.shape[2])
        weight = np.exp(score - score.max())
        out[b, n] = weight @ value[b, k, : last + 1] / weight.sum()
    return out, key, value


def test_reference_is_the_literal_definition():
    arguments = problem()
    actual = attend(arguments, choose.REFERENCE)
    for one, expected in zip(actual, literal(arguments), strict=True):
        np.testing.assert_allclose(one, expected, **TIGHT)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("N, K", [(3, 3), (6, 2)])
def test_heads_share_their_key_value_head(impl, N, K):
    arguments = problem(N=N, K=K)
    assert_same(attend(arguments, impl), attend(arguments, choose.REFERENCE), **TIGHT)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_many_blocks_with_a_rest(impl):
    """The last block begins inside the one before it; positions stand around the borders."""
    arguments = problem(B=7, S=408, position=[0, 127, 255, 256, 257, 407, 300])
    assert_same(attend(arguments, impl), attend(arguments, choose.REFERENCE), **TIGHT)


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_stays_within_its_noise(impl):
    """Two roundings of weights and values, each by at most 2**-9 of a weighted mean of values that
    stay below 4, beside the output's own rounding."""
    arguments = problem(dtype=jnp.bfloat16)
    actual = attend(arguments, impl, jnp.bfloat16)
    expected = attend(arguments, choose.REFERENCE, jnp.bfloat16)
    assert actual.out_BNH.dtype == actual.key_BKSH.dtype == jnp.bfloat16
    as_f32 = jax.tree.map(lambda x: np.asarray(x).astype(np.float32), (actual, expected))
    assert_same(*as_f32, rtol=2**-8, atol=4 * 2**-8)
    exact = attend((*(x.astype(F32) for x in arguments[:5]), arguments[5]), choose.REFERENCE)
    np.testing.assert_allclose(as_f32[0].out_BNH, exact.out_BNH, rtol=2**-8, atol=8 * 2**-8)


@pytest.mark.parametrize("impl", IMPLS)
def test_float32_operands_of_a_bfloat16_cache_are_not_rounded(impl):
    arguments = problem(dtype=jnp.bfloat16)
    arguments = (arguments[0].astype(F32), *arguments[1:])
    assert_same(attend(arguments, impl), attend(arguments, choose.REFERENCE), **TIGHT)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_lies_behind_the_position_has_no_influence(impl):
    arguments = problem(dtype=jnp.bfloat16)
    query, new_key, new_value, key, value, position = map(np.array, arguments)
    behind = (np.arange(key.shape[2]) > position[:, None])[:, None, :, None]
    stale = [np.where(behind, key.dtype.type(x), c) for x, c in ((3e38, key), (-3e38, value))]
    clean = attend(arguments, impl, jnp.bfloat16)
    dirty = attend((query, new_key, new_value, *stale, position), impl, jnp.bfloat16)
    np.testing.assert_array_equal(dirty.out_BNH, clean.out_BNH)


@pytest.mark.parametrize("impl", [choose.REFERENCE, *IMPLS])
@pytest.mark.parametrize("dtype", [F32, jnp.bfloat16])
def test_only_the_column_of_the_position_is_written(impl, dtype):
    arguments = problem(dtype=dtype)
    _, new_key, new_value, key, value, position = (np.asarray(x) for x in arguments)
    actual = attend(arguments, impl, dtype)
    for cache, new, found in (
        (key, new_key, actual.key_BKSH),
        (value, new_value, actual.value_BKSH),
    ):
        expected = cache.copy()
        for b, column in enumerate(position):
            expected[b, :, column] = new[b]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_position_outside_the_cache_leaves_other_rows_alone(impl):
    arguments = problem(position=[7, 48, 9, 30, 0])
    actual, expected = attend(arguments, impl), attend(arguments, choose.REFERENCE)
    others = np.array([0, 2, 3, 4])
    assert_same(*jax.tree.map(lambda x: np.asarray(x)[others], (actual, expected)), **TIGHT)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_does_not_depend_on_its_neighbours(impl):
    arguments, others = problem(), problem(seed=1)
    mine = np.arange(5) == 2
    mixed = [
        np.where(mine.reshape(-1, *[1] * (one.ndim - 1)), one, other)
        for one, other in zip(arguments, others, strict=True)
    ]
    for one, other in zip(attend(arguments, impl), attend(mixed, impl), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[2], np.asarray(other)[2])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_loop_carries_the_cache_in_place(impl):
    query, new_key, new_value, key, value, position = problem(S=256)

    def run(key, value, position):
        def step(state):
            count, query, key, value, position = state
            out = ops.decode_attention(
                query, new_key, new_value, key, value, position, impl=impl, operand_dtype=F32
            )
            return count + 1, *out, jnp.minimum(position + 1, 255)

        return jax.lax.while_loop(lambda s: s[0] < 3, step, (0, query, key, value, position))

    compiled = jax.jit(run, donate_argnums=(0, 1)).lower(key, value, position).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= key.nbytes + value.nbytes
    if impl == choose.XLA:  # an interpreted kernel copies what it is given
        assert memory.temp_size_in_bytes < key.nbytes / 2
    expected = [query, key, value]
    for step in range(3):
        at = np.minimum(np.asarray(position) + step, 255)
        expected = attend((expected[0], new_key, new_value, *expected[1:], at), choose.REFERENCE)
    found = compiled(jnp.array(key), jnp.array(value), position)[1:4]
    assert_same(ops.Attended(*found), ops.Attended(*expected), rtol=1e-5, atol=1e-5)


def test_auto_falls_back_where_the_kernel_takes_no_such_head():
    assert ops.resolve("auto", "tpu", head_size=128) == choose.PALLAS_TPU
    assert ops.resolve("auto", "tpu", head_size=64) == choose.XLA
    assert ops.resolve("pallas", "tpu", head_size=64) == choose.PALLAS_TPU
    assert ops.resolve("auto", "cpu", head_size=128) == choose.XLA


def refused(message, *, impl=choose.XLA, operand_dtype=F32, **replaced):
    names = ("query", "new_key", "new_value", "key", "value", "position")
    arguments = dict(zip(names, problem(), strict=True)) | replaced
    with pytest.raises(ValueError, match=message):
        ops.decode_attention(*arguments.values(), impl=impl, operand_dtype=operand_dtype)


def test_arrays_that_do_not_belong_together_are_refused():
    zeros = jnp.zeros
    refused(r"alike, got \(5, 1, 48, 16\) and \(5, 1, 47, 16\)", value=zeros((5, 1, 47, 16)))
    refused("both be bfloat16 or both float32", value=zeros((5, 1, 48, 16), jnp.bfloat16))
    refused(r"new key must be .* \(5, 1, 16\)", new_key=zeros((5, 2, 16)))
    refused(r"new value must be .* int32", new_value=zeros((5, 1, 16), jnp.int32))
    refused(r"a multiple of 1, 16\] .* got \(5, 2, 8\)", query=zeros((5, 2, 8)))
    two = dict(key=zeros((5, 2, 48, 16)), value=zeros((5, 2, 48, 16)))
    two |= dict(new_key=zeros((5, 2, 16)), new_value=zeros((5, 2, 16)))
    refused(r"a multiple of 2, 16\] .* got \(5, 3, 16\)", query=zeros((5, 3, 16)), **two)
    refused("query must be floating point, got int32", query=zeros((5, 2, 16), jnp.int32))
    refused(r"integers of shape \(5,\), got float32", position=zeros(5))
    refused("got float16", operand_dtype=jnp.float16)
    refused("got 'pallas'", impl="pallas")


def test_what_the_kernel_cannot_take_is_refused():
    refused("multiples of 128, .* got H=16: take `xla`", impl=choose.PALLAS_TPU)
    odd = [jnp.zeros((5, 1, 44, 16))] * 2
    refused("S=44 .* multiples of 8", impl=choose.PALLAS_INTERPRET, key=odd[0], value=odd[1])
