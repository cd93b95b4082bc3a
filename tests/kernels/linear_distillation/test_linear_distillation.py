"""The divergence from a teacher against its definition, and that against formulas in float64."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear_distillation import reference
from kernels.linear_distillation.schedule import value_and_gradients
from kernels.linear_distillation.xla import TokensAndHead
from kernels.linear_objective import xla
from kernels.linear_objective.schedule import HeadOptions

pytestmark = pytest.mark.slow

T, D, E, V = 37, 16, 24, 53
SUPPORT = dict(temperature=0.7, valid_vocab=V - 2)
# Float32 sums of some fifty products in another order.
TIGHT = dict(rtol=2e-5, atol=2e-5)
ROWS = {8: 1, 16: 4 * 8 * 16, "all": xla.BLOCK_BYTES}
"""Bytes of a block, by its rows; the last block is shorter."""


def objective(logprob_N, entropy_N, data):
    ratio = jnp.exp(logprob_N - data["behavior"])
    return -ratio * data["advantage"] - 0.1 * entropy_N


def silent(logprob_N, entropy_N, data):
    return jnp.zeros_like(logprob_N)


def problem(*, active=0.6, seed=0, T=T, V=V, D=D, E=E, scale=0.5):
    """Hidden states and head of policy and teacher, ids, active tokens, data and weights; garbage
    where a token is not active."""
    rng = np.random.default_rng(seed)
    active_T = rng.random(T) < active
    hidden_TD, teacher_TE = rng.normal(size=(T, D)), rng.normal(size=(T, E))
    ids_T = rng.integers(0, V - 2, T)
    weight_T = rng.random(T) + 0.1
    for array in (hidden_TD, teacher_TE, weight_T):
        array[~active_T] = np.nan
    ids_T[~active_T] = 10**6
    data = {"behavior": rng.normal(size=T) - 4, "advantage": rng.normal(size=T)}
    head_VD, teacher_head_VE = (scale * rng.normal(size=(V, X)) for X in (D, E))
    floats = hidden_TD, head_VD, teacher_TE, teacher_head_VE, weight_T, data
    hidden_TD, head_VD, teacher_TE, teacher_head_VE, weight_T, data = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), floats
    )
    ids_T = jnp.asarray(ids_T, jnp.int32)
    return (
        hidden_TD,
        head_VD,
        teacher_TE,
        teacher_head_VE,
        ids_T,
        jnp.asarray(active_T),
        data,
        weight_T,
    )


@functools.cache
def defined(top_k):
    """The definition: outputs, and its gradients in hidden and head."""

    def total(hidden_TD, head_VD, teacher_TE, teacher_head_VE, ids_T, active_T, data, weight_T):
        out = reference.linear_distillation(
            *(hidden_TD, head_VD, teacher_TE, teacher_head_VE, ids_T, active_T),
            *(data, objective, weight_T),
            top_k=top_k,
            **SUPPORT,
        )
        return out.loss, out

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


@functools.cache
def implemented(top_k, block_bytes=xla.BLOCK_BYTES, objective=objective, **options):
    options = HeadOptions(**SUPPORT, **options)

    def run(hidden_TD, head_VD, teacher_TE, teacher_head_VE, ids_T, active_T, data, weight_T):
        with mock.patch.object(xla, "BLOCK_BYTES", block_bytes):
            return value_and_gradients(
                TokensAndHead(hidden_TD, head_VD),
                TokensAndHead(teacher_TE, teacher_head_VE),
                *(ids_T, active_T, data, objective, weight_T),
                options,
                top_k=top_k,
            )

    return jax.jit(run)


@pytest.mark.parametrize("top_k", [None, 1, 5, V - 3])
def test_divergence_and_its_gradient_are_those_of_formulas_in_float64(top_k):
    """p (a - KL) in the logits, where a is log p - log q, of all other ids the same."""
    rng = np.random.default_rng(3)
    z_TV, teacher_TV = rng.normal(size=(4, V)) * 2, rng.normal(size=(4, V)) * 2
    temperature, valid = SUPPORT["temperature"], SUPPORT["valid_vocab"]

    def log_softmax(z_TV):
        z_TV = z_TV[:, :valid] / temperature
        return z_TV - np.log(np.exp(z_TV).sum(axis=1, keepdims=True))

    log_p, log_q = log_softmax(z_TV), log_softmax(teacher_TV)
    a = log_p - log_q
    for t in range(4):
        others = np.argsort(-log_q[t])[top_k or valid :]
        if len(others):
            a[t, others] = np.log(np.exp(log_p[t, others]).sum())
            a[t, others] -= np.log(np.exp(log_q[t, others]).sum())
    expected = (np.exp(log_p) * a).sum(axis=1)
    slope = np.exp(log_p) * (a - expected[:, None]) / temperature

    with jax.enable_x64(True):
        of = lambda z: reference.divergence(z, jnp.array(teacher_TV), top_k=top_k, **SUPPORT)
        np.testing.assert_allclose(of(jnp.array(z_TV)), expected, rtol=1e-12)
        found = jax.grad(lambda z: of(z).sum())(jnp.array(z_TV))
    np.testing.assert_allclose(found[:, :valid], slope, rtol=1e-9, atol=1e-12)
    assert (np.asarray(found)[:, valid:] == 0).all()


@pytest.mark.parametrize(
    "schedule, chunk_tokens, rows, top_k",
    # Every size of chunks and of blocks with each schedule.
    [
        ("fast", None, "all", None),
        ("fast", 8, 16, 5),
        ("fast", 1, 8, None),
        ("lean", None, 8, 5),
        ("lean", 8, "all", 5),
        ("lean", 1, 16, None),
    ],
)
def test_chunks_and_blocks_match_the_definition(schedule, chunk_tokens, rows, top_k):
    arguments = problem()
    (_, out), (d_hidden, d_head) = defined(top_k)(*arguments)
    found = implemented(
        top_k, schedule=schedule, chunk_tokens=chunk_tokens, block_bytes=ROWS[rows]
    )(*arguments)
    np.testing.assert_allclose(found.divergence_T, out.divergence_T, **TIGHT)
    np.testing.assert_allclose(found.scores.logprob, out.logprob_T, **TIGHT)
    np.testing.assert_allclose(found.scores.entropy, out.entropy_T, **TIGHT)
    np.testing.assert_allclose(found.hidden_TD, d_hidden, **TIGHT)
    np.testing.assert_allclose(found.head_VD, d_head, **TIGHT)
    assert np.abs(d_head).max() > 0.1 and out.divergence_T.max() > 0.5


def test_a_top_k_of_the_whole_vocabulary_is_the_whole_divergence():
    arguments = problem()
    whole, every = implemented(None)(*arguments), implemented(V)(*arguments)
    np.testing.assert_array_equal(whole.divergence_T, every.divergence_T)
    fewer = implemented(5)(*arguments).divergence_T
    active = np.asarray(arguments[5])
    assert (fewer >= -1e-6).all() and (fewer < whole.divergence_T)[active].all()


@pytest.mark.parametrize("schedule", ["fast", "lean"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top_k", [None, 5])
def test_a_teacher_that_is_the_policy_says_nothing(top_k, dtype, schedule):
    hidden, head, _, _, *rest = problem()
    hidden = hidden.astype(dtype)
    how = dict(schedule=schedule, chunk_tokens=8, block_bytes=ROWS[16], objective=silent)
    found = implemented(top_k, **how)(hidden, head, hidden, head, *rest)
    for array in (found.divergence_T, found.hidden_TD, found.head_VD):
        assert np.abs(np.float32(array)).max() < 2e-6


def test_bfloat16_is_as_near_as_its_products():
    """The error of the whole gradient against that of bfloat16 operands without any chunks."""
    arguments = problem(active=1.0)
    hidden, head, teacher, teacher_head, *rest = arguments
    _, expected = defined(None)(*arguments)
    rounded = [x.astype(jnp.bfloat16) for x in (hidden, head, teacher, teacher_head)]
    _, own = defined(None)(*rounded, *rest)
    error = lambda found: (
        np.linalg.norm(np.float64(found) - expected[1]) / np.linalg.norm(expected[1])
    )
    for schedule in ("fast", "lean"):
        found = implemented(None, schedule=schedule)(
            hidden.astype(jnp.bfloat16), head, teacher.astype(jnp.bfloat16), teacher_head, *rest
        )
        assert error(found.head_VD) < 2 * error(own[1]) < 0.05


def test_equal_likelihood_at_the_end_of_the_top_k_counts_whole():
    """Tokens that were never trained have equal rows: which of them is taken must not matter."""
    hidden, head, teacher, teacher_head, *rest = problem(active=1.0)
    teacher_head = teacher_head.at[20:30].set(teacher_head[20])
    arguments = (hidden, head, teacher, teacher_head, *rest)
    for top_k in (3, 12):
        (_, out), (_, d_head) = defined(top_k)(*arguments)
        found = implemented(top_k, chunk_tokens=8, block_bytes=ROWS[16])(*arguments)
        np.testing.assert_allclose(found.divergence_T, out.divergence_T, **TIGHT)
        np.testing.assert_allclose(found.head_VD, d_head, **TIGHT)


def test_a_teacher_that_is_nearly_certain_leaves_all_finite():
    hidden, head, teacher, teacher_head, *rest = problem(scale=8.0)
    for top_k in (None, 3):
        found = implemented(top_k)(hidden, head, teacher, teacher_head, *rest)
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(found))
        (_, out), _ = defined(None)(hidden, head, teacher, teacher_head, *rest)
        assert found.divergence_T.max() > 50
        if top_k is None:
            np.testing.assert_allclose(found.divergence_T, out.divergence_T, rtol=1e-4, atol=1e-4)


def test_no_active_token_is_no_gradient():
    arguments = problem(active=0.0)
    found = implemented(5)(*arguments)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(found))


def test_heads_of_different_rows_are_refused():
    hidden, head, teacher, teacher_head, *rest = problem()
    with pytest.raises(ValueError, match="same rows, got 53 of the policy and 50 of the teacher"):
        implemented(None)(hidden, head, teacher, teacher_head[:50], *rest)
