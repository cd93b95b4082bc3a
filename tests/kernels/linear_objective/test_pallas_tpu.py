"""The head's TPU kernels, interpreted on CPU; and, where the compiler is there, compiled for v6e.

Dimension key:
    C: tokens of a chunk
    D: model width
    V: rows of the head
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.random_problems import GrpoData, grpo_objective
from kernels import choose
from kernels.linear_objective import pallas_tpu, reference, vmem_plan, xla
from kernels.linear_objective.schedule import SCHEDULES, HeadOptions, value_and_gradients
from kernels.token_logprob.reference import TokenLogprob
from kernels.token_logprob.statistics import Statistics, Support, finish, merge, slopes
from tests.kernels.tpu_compiler import needs_compiler, run_with_compiler

pytestmark = pytest.mark.slow

TILE = 16
KERNELS = (
    functools.partial(pallas_tpu.score, interpret=True, tile_rows=TILE),
    functools.partial(pallas_tpu.gradient, interpret=True, tile_rows=TILE),
)
XLA = (xla.score, xla.gradient)


def problem(C, D, V, dtype=jnp.float32, seed=0):
    """Hidden, head and ids; logits of a few nats."""
    rng = np.random.default_rng(seed)
    hidden_CD = jnp.asarray(rng.normal(size=(C, D)), dtype)
    head_VD = jnp.asarray(rng.normal(size=(V, D)) * 3 / D**0.5, dtype)
    return hidden_CD, head_VD, np.asarray(rng.integers(0, V, C), np.int32)


def cotangents(C, seed=1):
    return TokenLogprob(*np.random.default_rng(seed).normal(size=(3, C)).astype(np.float32))


@functools.partial(jax.jit, static_argnames=("passes", "support", "keep"))
def both_passes(passes, hidden_CD, head_VD, ids_C, support, *, keep):
    """Scores, d_hidden and d_head of one chunk, by these two passes."""
    score, gradient = passes
    found, kept = score(hidden_CD, head_VD, ids_C, support, keep=keep)
    scored = finish(found, ids_C, support)
    slope = slopes(scored, cotangents(len(ids_C)), support)
    start_VD = jnp.full(head_VD.shape, 0.5, jnp.float32)
    d_hidden_CD, d_head_VD = gradient(hidden_CD, head_VD, ids_C, slope, support, start_VD, kept)
    return scored, d_hidden_CD, d_head_VD


def assert_same(actual, expected, tolerance):
    """Within `tolerance` of the largest entry of each array."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        size = np.abs(other, where=np.isfinite(other), out=np.zeros(other.shape)).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("keep", [True, False], ids=["fast", "lean"])
@pytest.mark.parametrize("C, D, V", [(13, 24, 53), (300, 8, 32)])
def test_passes_equal_those_of_xla(C, D, V, keep):
    hidden_CD, head_VD, ids_C = problem(C, D, V)
    support = Support(0.7, V - 3)
    ids_C[:4] = [-1, V - 2, V, V + 5]
    expected = both_passes(XLA, hidden_CD, head_VD, ids_C, support, keep=keep)
    actual = both_passes(KERNELS, hidden_CD, head_VD, ids_C, support, keep=keep)
    # float32 both, sums in another order.
    assert_same(actual, expected, 2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_objective_equals_the_reference_whatever_inactive_tokens_hold(schedule, monkeypatch):
    monkeypatch.setattr(vmem_plan, "TILE_ROWS", (TILE,))
    hidden_TD, head_VD, ids_T = problem(21, 24, 53)
    active_T = np.arange(21) % 3 != 1
    rng = np.random.default_rng(2)
    data = GrpoData(*jnp.asarray(rng.normal(size=(2, 21)) - 2, jnp.float32))
    temperature, valid_vocab = 1.3, 50

    def loss(hidden_TD, head_VD):
        return reference.linear_objective(
            hidden_TD,
            head_VD,
            ids_T,
            active_T,
            data,
            grpo_objective,
            temperature=temperature,
            valid_vocab=valid_vocab,
        ).loss

    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden_TD, head_VD)
    garbage_TD = np.where(active_T[:, None], hidden_TD, np.nan)
    found = jax.jit(value_and_gradients, static_argnums=(5, 6))(
        garbage_TD,
        head_VD,
        np.where(active_T, ids_T, 10**6),
        active_T,
        data,
        grpo_objective,
        HeadOptions(
            schedule=schedule,
            impl=choose.PALLAS_INTERPRET,
            chunk_tokens=8,
            temperature=temperature,
            valid_vocab=valid_vocab,
        ),
    )
    assert_same((found.hidden_TD, found.head_VD), expected, 1e-5)


@pytest.mark.parametrize("keep", [True, False], ids=["fast", "lean"])
def test_shards_add_up_to_the_whole_head(keep):
    hidden_CD, head_VD, ids_C = problem(9, 16, 40)
    support = Support(1.0, 37)
    expected = both_passes(XLA, hidden_CD, head_VD, ids_C, support, keep=keep)
    score, gradient = KERNELS

    # The first column is traced, as it is where it comes from the place of a device.
    @jax.jit
    def shard_score(first, rows):
        return score(hidden_CD, rows, ids_C, support, first_column=first, keep=keep)

    @jax.jit
    def shard_gradient(first, rows, slope, kept):
        start = jnp.full(rows.shape, 0.5)
        return gradient(hidden_CD, rows, ids_C, slope, support, start, kept, first_column=first)

    shards = [(np.int32(first), head_VD[first : first + 20]) for first in (0, 20)]
    found, kept = zip(*(shard_score(*shard) for shard in shards), strict=True)
    scored = finish(merge(Statistics(*map(np.stack, zip(*found, strict=True)))), ids_C, support)
    slope = slopes(scored, cotangents(9), support)
    parts = [shard_gradient(*shard, slope, one) for shard, one in zip(shards, kept, strict=True)]
    d_hidden_CD = parts[0][0] + parts[1][0]
    d_head_VD = np.concatenate([parts[0][1], parts[1][1]])
    assert_same((scored, d_hidden_CD, d_head_VD), expected, 2e-6)


@pytest.mark.parametrize("keep", [True, False], ids=["fast", "lean"])
def test_error_in_16_bits_is_that_of_xla(keep):
    hidden_CD, head_VD, ids_C = problem(32, 64, 200, jnp.bfloat16)
    support = Support(1.0, 200)
    exact = both_passes(
        XLA,
        hidden_CD.astype(jnp.float32),
        head_VD.astype(jnp.float32),
        ids_C,
        support,
        keep=False,
    )

    def errors(passes):
        found = both_passes(passes, hidden_CD, head_VD, ids_C, support, keep=keep)
        return [
            np.linalg.norm(one - other) / np.linalg.norm(other)
            for one, other in zip(map(np.asarray, found[1:]), exact[1:], strict=True)
        ]

    actual, bar = errors(KERNELS), errors(XLA)
    # Both round the gradient of the logits to 16 bits; what is kept is rounded as well, relative
    # to the top of its tile.
    assert all(one <= 2 * other for one, other in zip(actual, bar, strict=True)), (actual, bar)


def test_nan_in_a_token_reaches_its_own_gradient():
    hidden_CD, head_VD, ids_C = problem(13, 24, 53)
    hidden_CD = hidden_CD.at[1].set(jnp.nan)
    support = Support(0.7, 50)
    scored, d_hidden_CD, _ = both_passes(KERNELS, hidden_CD, head_VD, ids_C, support, keep=True)
    alone = np.arange(13) == 1
    np.testing.assert_array_equal(np.isnan(scored.logprob) & (ids_C < 50), alone)
    np.testing.assert_array_equal(np.isnan(d_hidden_CD).all(axis=1), alone)
    np.testing.assert_array_equal(np.isnan(d_hidden_CD).any(axis=1), alone)


def test_chunk_that_cannot_fit_is_refused_with_one_that_does():
    hidden_CD = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    head_VD = jax.ShapeDtypeStruct((1000, 4096), jnp.bfloat16)
    with pytest.raises(ValueError, match="fewer chunk_tokens, at most 2048"):
        vmem_plan.fitting_rows(hidden_CD, head_VD)


COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from kernels.linear_objective.ops import linear_objective
from kernels.linear_objective.schedule import HeadOptions
from benchmarks.random_problems import GrpoData, grpo_objective

topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4")
bf16 = jnp.bfloat16
shape = (2, 2, 2)
devices = np.array(topology.devices).reshape(shape)
mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
T, D, V = 8192, 2048, 151936
options = HeadOptions(schedule="lean", impl="pallas_tpu", vocab_axis="tensor")

def loss(hidden, head, ids, active, data):
    return linear_objective(
        hidden, head, ids, active, data, grpo_objective, options,
        mesh=mesh, token_axes=("data", "fsdp"),
    ).loss

def array(spec, dtype, *dims):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

tokens = P(("data", "fsdp"))
data = GrpoData(array(tokens, jnp.float32, T), array(tokens, jnp.float32, T))
compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(
    array(tokens, bf16, T, D), array(P("tensor"), bf16, V, D),
    array(tokens, jnp.int32, T), array(tokens, jnp.bool_, T), data,
).compile()
temp = compiled.memory_analysis().temp_size_in_bytes
head_grad = V * D * 4 // 2
assert temp < 2.2 * head_grad, temp
"""


@pytest.mark.slow
@needs_compiler
def test_compiles_for_eight_v6e_chips_without_needless_copies():
    # There are the local sum of the head's gradient and its reduction. One chip is in
    # benchmarks/tpu/test_kernel_report.py, whose budgets leave no room for a second copy either.
    run_with_compiler(COMPILE)
