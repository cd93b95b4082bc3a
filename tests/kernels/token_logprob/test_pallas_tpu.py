"""The TPU kernels of the token logprob, interpreted: each view and tiling against float64.

The last tests ask the TPU compiler itself, which needs libtpu and no TPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.token_logprob import pallas_tpu
from kernels.token_logprob.logits_tiling import View, default_view
from kernels.token_logprob.reference import TokenLogprob
from kernels.token_logprob.statistics import Support, finish, merge, slopes
from tests.kernels.token_logprob.test_token_logprob import literal, literal_gradient, sample
from tests.kernels.tpu_compiler import needs_compiler, run_with_compiler

pytestmark = pytest.mark.slow

# Shape, columns, tiling: several tiles along both axes, the last of each ragged.
TILINGS = {
    "vocab": ((2, 8), 300, dict(minor="vocab", block_tokens=3, block_vocab=128)),
    "time": ((2, 5), 70, dict(minor="time", block_tokens=2, block_vocab=32)),
    "dense": ((2, 384), 7, dict(minor="time", block_tokens=4, block_vocab=3)),
}
# log p reaches -30, where float32 is spaced by 2e-6, and cotangents and 1 / temperature are a few.
ATOL = 1e-5
each_tiling = pytest.mark.parametrize("shape, V, tiling", TILINGS.values(), ids=TILINGS)


@functools.cache
def compiled(support, **tiling):
    """Both kernels, once for all logits of a shape."""
    options: dict[str, Any] = dict(interpret=True, **tiling)

    def run(logits, ids):
        return finish(pallas_tpu.statistics(logits, ids, support, **options), ids, support)

    def pull(logits, ids, outputs, cotangents):
        slope = slopes(outputs, TokenLogprob(*cotangents), support)
        return pallas_tpu.logits_gradient(logits, ids, slope, support, **options)

    return jax.jit(run), jax.jit(pull)


def outputs_and_gradients(logits, ids, cotangents, support, **tiling):
    """The outputs, and the gradient of each one's cotangent-weighted sum."""
    run, pull = compiled(support, **tiling)
    outputs = run(logits, ids)
    gradients = []
    for one in range(3):
        alone = [np.float32(c if k == one else 0 * c) for k, c in enumerate(cotangents)]
        gradients.append(np.asarray(pull(logits, ids, outputs, alone)))
    return TokenLogprob(*map(np.asarray, outputs)), gradients


def exact_gradient(logits, ids, cotangents, support):
    """Closed form in float64, itself held to differences of `literal` by the test below."""
    z = np.asarray(logits, np.float64)[..., : support.columns] / support.temperature
    log_p = z - literal(logits, ids, support.temperature, support.columns)[1][..., None]
    p, here = np.exp(log_p), np.arange(support.columns) == np.asarray(ids)[..., None]
    entropy = -(p * log_p).sum(-1, keepdims=True)
    d_logprob, d_logsumexp, d_entropy = (c[..., None] for c in cotangents)
    inside = d_logprob * (here - p) + d_logsumexp * p - d_entropy * p * (log_p + entropy)
    gradient = np.zeros(np.shape(logits))
    gradient[..., : support.columns] = inside / support.temperature
    return gradient


def test_the_closed_form_agrees_with_differences():
    logits, ids, cotangents = sample((3,), 9)
    np.testing.assert_allclose(
        exact_gradient(logits, ids, cotangents, Support(0.7, 8)),
        literal_gradient(logits, ids, cotangents, 0.7, 8),
        atol=1e-8,  # of differences with h = 1e-5
    )


@each_tiling
def test_values_and_every_gradient_match_float64(shape, V, tiling):
    logits, ids, cotangents = sample(shape, V)
    support = Support(temperature=0.7, columns=V - 1)
    actual, gradients = outputs_and_gradients(logits, ids, cotangents, support, **tiling)
    expected = literal(logits, ids, 0.7, V - 1)
    np.testing.assert_allclose(np.array(actual), expected, rtol=1e-5, atol=1e-5)
    for one, gradient in enumerate(gradients):
        weighted = np.where(np.arange(3).reshape(3, *[1] * len(shape)) == one, cotangents, 0)
        np.testing.assert_allclose(
            gradient, exact_gradient(logits, ids, weighted, support), rtol=2e-5, atol=ATOL
        )


@pytest.mark.parametrize("shape", [(), (2, 2, 3)])
def test_any_leading_dimensions_are_taken(shape):
    logits, ids, cotangents = sample(shape, 24)
    support = Support(1.0, 24)
    actual, gradients = outputs_and_gradients(logits, ids, cotangents, support)
    np.testing.assert_allclose(np.array(actual), literal(logits, ids), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        sum(gradients), exact_gradient(logits, ids, cotangents, support), rtol=2e-5, atol=ATOL
    )


@each_tiling
def test_bfloat16_is_rounded_once_at_the_end(shape, V, tiling):
    logits, ids, cotangents = sample(shape, V)
    rounded = logits.astype(ml_dtypes.bfloat16)
    support = Support(1.0, V)
    actual, gradients = outputs_and_gradients(rounded, ids, cotangents, support, **tiling)
    np.testing.assert_allclose(np.array(actual), literal(rounded, ids), rtol=1e-5, atol=1e-5)
    for one, gradient in enumerate(gradients):
        assert gradient.dtype == jnp.bfloat16
        weighted = np.where(np.arange(3).reshape(3, *[1] * len(shape)) == one, cotangents, 0)
        np.testing.assert_allclose(
            gradient.astype(np.float32),
            exact_gradient(rounded, ids, weighted, support),
            rtol=2**-8,  # 8 bits of significand
            atol=ATOL,
        )


@pytest.mark.parametrize("minor", ["vocab", "time"])
def test_an_id_is_found_in_its_own_tile_alone(minor):
    # Ids are sought with 16 bits in bfloat16: 65536 columns further must not count as here.
    logits, _, cotangents = sample((2,), 66000)
    logits, ids = logits.astype(ml_dtypes.bfloat16), np.array([5, 65999], np.int32)
    support, tiling = Support(1.0, 66000), dict(minor=minor, block_vocab=4096)
    actual, gradients = outputs_and_gradients(logits, ids, cotangents, support, **tiling)
    np.testing.assert_allclose(np.array(actual), literal(logits, ids), rtol=1e-5, atol=1e-5)
    expected = exact_gradient(logits, ids, cotangents, support)
    np.testing.assert_allclose(
        sum(g.astype(np.float32) for g in gradients), expected, rtol=2**-7, atol=ATOL
    )


@each_tiling
def test_columns_without_probability_act_as_absent(shape, V, tiling):
    logits, ids, cotangents = sample(shape, V)
    logits[..., 1::3] = -np.inf
    logits[..., 0, :] = -np.inf  # rows without any support
    ids = ids - ids % 3
    ids[..., 1] = 1  # an impossible id
    support = Support(temperature=0.7, columns=V - 1)
    actual, gradients = outputs_and_gradients(logits, ids, cotangents, support, **tiling)
    assert (actual.logprob[..., :2] == -jnp.inf).all()
    assert (actual.logsumexp[..., 0] == -jnp.inf).all() and (actual.entropy[..., 0] == 0).all()
    with np.errstate(invalid="ignore"):
        expected = literal(logits[..., 2:, :], ids[..., 2:], 0.7, V - 1)
    np.testing.assert_allclose(np.array(actual)[..., 2:], expected, rtol=1e-5, atol=1e-5)
    gradient = np.array(gradients)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[..., 1::3], 0)
    np.testing.assert_array_equal(gradient[..., 0, :], 0)
    np.testing.assert_array_equal(gradient[0][..., 1, :], 0)


@each_tiling
def test_a_broken_logit_breaks_its_own_row_alone(shape, V, tiling):
    logits, ids, cotangents = sample(shape, V)
    logits[0, 1, V - 2] = np.nan
    logits[1, 0, 0] = np.inf
    logits[..., V - 1] = np.nan  # outside the support
    support = Support(temperature=0.7, columns=V - 1)
    actual, gradients = outputs_and_gradients(logits, ids, cotangents, support, **tiling)
    broken = np.zeros(shape, bool)
    broken[0, 1] = broken[1, 0] = True
    for value in actual:
        np.testing.assert_array_equal(np.isnan(value), broken)
    for gradient in gradients:
        np.testing.assert_array_equal(np.isnan(gradient).any(-1), broken)


@each_tiling
def test_shards_of_the_vocabulary_merge_into_the_whole(shape, V, tiling):
    logits, ids, cotangents = sample(shape, V)
    columns = V // 2
    logits, support = logits[..., : 2 * columns], Support(1.0, 2 * columns - 1)
    ids %= support.columns
    options: dict[str, Any] = dict(interpret=True, **tiling)
    # A traced first column, as the index of a mesh axis makes it.
    one = jax.jit(
        lambda part, first: pallas_tpu.statistics(part, ids, support, first_column=first, **options)
    )
    halves = [logits[..., :columns], logits[..., columns:]]
    parts = [one(half, k * columns) for k, half in enumerate(halves)]
    merged = jax.jit(lambda parts: finish(merge(parts), ids, support))
    outputs = merged(jax.tree.map(lambda *x: np.stack(x), *parts))
    expected = literal(logits, ids, 1.0, support.columns)
    np.testing.assert_allclose(np.array(outputs), expected, rtol=1e-5, atol=1e-5)

    slope = slopes(outputs, TokenLogprob(*np.asarray(cotangents, np.float32)), support)
    pull = jax.jit(
        lambda part, first: pallas_tpu.logits_gradient(
            part, ids, slope, support, first_column=first, **options
        )
    )
    gradient = np.concatenate([pull(half, k * columns) for k, half in enumerate(halves)], -1)
    np.testing.assert_allclose(
        gradient, exact_gradient(logits, ids, cotangents, support), rtol=2e-5, atol=ATOL
    )


@pytest.mark.parametrize(
    "shape, dtype, view",
    [
        # What XLA:TPU (libtpu 0.0.42) gives the argument of a program.
        ((1, 4096, 151643), "bfloat16", View.TIME_MINOR),
        ((1, 4096, 151643), "float32", View.TIME_DENSE),
        ((4, 1024, 151643), "bfloat16", View.TIME_DENSE),
        ((3, 256, 151643), "bfloat16", View.TIME_MINOR),
        ((4, 1000, 151643), "bfloat16", View.VOCAB_MINOR),
        ((4, 1024, 151936), "bfloat16", View.VOCAB_MINOR),
        ((4, 130, 24), "float32", View.TIME_MINOR),
    ],
)
def test_the_default_view_is_the_least_padded_order(shape, dtype, view):
    assert default_view(shape, jnp.dtype(dtype)) is view


COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from kernels.token_logprob import ops

devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices

def loss(logits, ids, vocab_axis=None):
    out = ops.token_logprob(logits, ids, impl="pallas_tpu", vocab_axis=vocab_axis)
    return (out.logprob + 0.01 * out.entropy).sum()

def compiled(run, mesh, spec, B, T, V, dtype):
    logits = jax.ShapeDtypeStruct((B, T, V), dtype, sharding=NamedSharding(mesh, spec))
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=NamedSharding(mesh, P(*spec[:2])))
    return jax.jit(run).lower(logits, ids).compile()

def check(B, T, V, dtype="bfloat16"):
    run = compiled(jax.grad(loss), Mesh(devices[:1], "x"), P(None, None, None), B, T, V, dtype)
    logits_bytes = B * T * V * jnp.dtype(dtype).itemsize
    memory = run.memory_analysis()
    beside = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    beside -= memory.output_size_in_bytes
    # At most two arrays with a whole row of 128 float32 per token: 1 % of a vocabulary of 51200.
    assert beside < 1100 * B * T, (B, T, V, beside)
    assert run.cost_analysis()["bytes accessed"] < 3.1 * logits_bytes, (B, T, V)
"""


REAL_SHAPES = """
check(1, 4096, 151643)
check(1, 4096, 151643, "float32")
check(4, 1024, 151936)
check(4, 1000, 49152)
"""
ODD_SHAPES_AND_SHARDS = """
single = Mesh(devices[:1], "x")
for shape, dtype in [
    ((1, 1, 151643), "bfloat16"),
    ((3, 5, 24), "float32"),
    ((2, 7, 32001), "bfloat16"),
    ((2, 7, 32001), "float32"),
    ((1, 127, 24), "bfloat16"),
    ((2, 130, 49152), "float32"),
]:
    compiled(jax.grad(loss), single, P(None, None, None), *shape, dtype)

mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "tensor"))
spec = P("data", None, "tensor")
run = jax.shard_map(
    jax.grad(lambda *batch: loss(*batch, vocab_axis="tensor")),
    mesh=mesh, in_specs=(spec, P("data", None)), out_specs=spec, check_vma=False,
)
compiled(run, mesh, spec, 4, 1024, 151936, "bfloat16")
"""


@pytest.mark.slow
@needs_compiler
def test_compiles_for_v6e_and_real_shapes_without_a_copy():
    # (4, 1024, 151643) is held to tighter budgets in benchmarks/tpu/test_kernel_report.py.
    run_with_compiler(COMPILE + REAL_SHAPES + ODD_SHAPES_AND_SHARDS)
