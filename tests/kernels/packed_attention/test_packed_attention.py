"""Packed attention, value and gradient: every implementation against float64, and its laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import float64_attention
from kernels import choose
from kernels.packed_attention import ops
from tests.kernels.packed_attention.problems import (
    F32,
    IMPLS,
    ROWS,
    arrays,
    exact,
    program,
    rel_l2,
    segments,
)

BLOCKWISE = (choose.XLA, choose.PALLAS_INTERPRET)
BF16 = jnp.dtype("bfloat16")

pytestmark = pytest.mark.slow


def test_the_float64_gradient_is_that_of_finite_differences():
    rows = np.array([[1, 1, 2, 2, 2, 0]], np.int32)
    given = [np.asarray(each) for each in arrays(rows=rows, N=2, K=1, H=3)]
    given[:3] = [each.astype(np.float64) for each in given[:3]]
    options = {"window": 2, "soft_cap": 1.5}
    found = float64_attention.value_and_gradients(*given, **options)

    def loss():
        return (float64_attention.value_and_gradients(*given, **options).out * given[4]).sum()

    for array, gradient in zip(given[:3], found[1:], strict=True):
        for place in np.ndindex(array.shape):
            kept, sides = array[place], []
            for step in (1e-5, -1e-5):
                array[place] = kept + step
                sides.append(loss())
            array[place] = kept
            assert gradient[place] == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-8)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 20},  # less than a block
        {"window": 130, "soft_cap": 2.0},
        {"soft_cap": 0.5},
    ],
    ids=str,
)
def test_value_and_gradient_are_those_of_float64(impl, options):
    given = arrays()
    found, truth = program(impl, **options)(*given), exact(*given, **options)
    for name in truth._fields:
        # Sums of at most 300 terms of float32 in another order.
        assert rel_l2(getattr(found, name), getattr(truth, name)) < 2e-6, name


@pytest.mark.parametrize("impl", IMPLS)
def test_a_window_of_one_token_gives_that_token_its_own_value(impl):
    given = arrays()
    found = program(impl, window=1)(*given)
    own = np.repeat(np.asarray(given[2]), 2, axis=2)
    np.testing.assert_allclose(found.out, np.where(ROWS[..., None, None] != 0, own, 0), rtol=1e-6)
    np.testing.assert_allclose(found.query, np.zeros_like(found.query), atol=2e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("N, K, H", [(3, 3, 16), (6, 1, 24)])
def test_heads_share_their_key_value_head(impl, N, K, H):
    given = arrays(N=N, K=K, H=H)
    found, truth = program(impl)(*given), exact(*given)
    for name in truth._fields:
        assert rel_l2(getattr(found, name), getattr(truth, name)) < 2e-6, name


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_stays_within_its_noise(impl):
    """Inputs are rounded before truth is worked out. Then weights, their gradient and the result
    are rounded, and the queries once more, scaled; each by up to 2**-9 and 1.7e-3 on average."""
    given = arrays(dtype=BF16)
    found, truth = program(impl, BF16)(*given), exact(*given)
    for name in truth._fields:
        assert getattr(found, name).dtype == BF16
        assert rel_l2(getattr(found, name), getattr(truth, name)) < 6e-3, name


@pytest.mark.parametrize("impl", IMPLS)
def test_tokens_of_another_segment_change_nothing(impl):
    """An implementation that leaves the segments out passes no test but one like this."""
    given = arrays()
    others = arrays(seed=1)
    mine = np.asarray(ROWS[0] == 6)
    mixed = [
        each.at[0].set(jnp.where(mine[:, None, None], each[0], other[0]))
        for each, other in zip(given[:3], others[:3], strict=True)
    ]
    run = program(impl)
    for one, other in zip(run(*given), run(*mixed, *given[3:]), strict=True):
        np.testing.assert_array_equal(one[0][mine], other[0][mine])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_segment_alone_in_a_row_gives_what_it_gives_in_a_packed_one(impl):
    given = arrays()
    mine = slice(130, 200)
    assert set(ROWS[0, mine]) == {6} and ROWS[0, 129] != 6 and ROWS[0, 200] != 6
    alone = [jnp.zeros_like(each[:1]).at[0, :70].set(each[0, mine]) for each in given]
    run = program(impl)
    packed = run(*given)
    for one, other in zip(run(*alone), packed, strict=True):
        np.testing.assert_allclose(one[0, :70], other[0, mine], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_gives_zeros_and_takes_no_gradient(impl):
    given = arrays()
    padding = ROWS == 0
    assert padding[2].all() and padding[0].any()
    for found in program(impl)(*given):
        assert not np.asarray(found)[padding].any()
        assert np.isfinite(found).all()


@pytest.mark.parametrize("impl", BLOCKWISE)
def test_blocks_without_a_common_segment_are_not_visited(impl):
    """What a product meets it multiplies, if only by a weight of 0, and 0 times NaN is NaN."""
    rows = np.array([segments(128, 128, tokens=384)], np.int32)
    query, key, value, segment, d_out = arrays(rows=rows)
    for mine, other in ((1, 2), (2, 1)):
        spoilt = np.asarray(rows[0] == other)[None, :, None, None]
        spoil = lambda each, spoilt=spoilt: jnp.where(spoilt, jnp.nan, each)
        found = program(impl)(spoil(query), spoil(key), spoil(value), segment, d_out)
        for each in found:
            assert np.isfinite(np.asarray(each)[rows == mine]).all()


@pytest.mark.parametrize("impl", BLOCKWISE)
def test_blocks_before_the_window_are_not_visited(impl):
    rows = np.array([segments(384, tokens=384)], np.int32)
    query, key, value, segment, d_out = arrays(rows=rows)
    key, value = (each.at[:, :128].set(jnp.nan) for each in (key, value))
    found = program(impl, window=100)(query, key, value, segment, d_out)
    assert np.isfinite(found.out[:, 256:]).all()
    assert np.isnan(found.out[:, 128]).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_and_heads_may_be_cut_over_a_mesh(impl):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, heads = P("data"), P("data", None, "tensor")
    given = arrays()
    cut = jax.shard_map(
        program(impl),
        mesh=mesh,
        in_specs=(heads, heads, heads, rows, heads),
        out_specs=heads,
        check_vma=False,
    )
    for one, other in zip(jax.jit(cut)(*given), program(impl)(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_layer_that_is_recomputed_has_the_same_gradient(impl):
    query, key, value, segment, d_out = arrays()

    def loss(query, key, value):
        out = ops.packed_attention(query, key, value, segment, operand_dtype=F32, impl=impl)
        return (out * d_out).sum()

    gradients = [
        jax.jit(jax.grad(each, argnums=(0, 1, 2)))(query, key, value)
        for each in (loss, jax.checkpoint(loss))
    ]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
