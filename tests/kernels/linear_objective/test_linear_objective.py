"""The head without logits against its definition: values and every gradient, on one device."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear_objective import ops, reference, xla
from kernels.linear_objective.ops import HeadOptions
from kernels.linear_objective.schedule import chunk_size, score, value_and_gradients

pytestmark = pytest.mark.slow

T, D, V = 37, 16, 53
SUPPORT = dict(temperature=0.7, valid_vocab=V - 2)


def objective(logprob_N, entropy_N, data):
    """A clipped surrogate with an entropy bonus and an integer among its data."""
    ratio = jnp.exp(logprob_N - data["behavior"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    surrogate = jnp.minimum(ratio * data["advantage"], clipped * data["advantage"])
    return -surrogate - 0.1 * data["kind"] * entropy_N


def problem(*, active=0.6, seed=0, T=T, V=V):
    """Arguments of linear_objective but objective and options; garbage where not active."""
    rng = np.random.default_rng(seed)
    active_T = rng.random(T) < active
    hidden_TD = rng.normal(size=(T, D)).astype(np.float32)
    ids_T = rng.integers(0, V - 2, T).astype(np.int32)
    hidden_TD[~active_T] = np.nan
    ids_T[~active_T] = 10**6
    data = {
        "behavior": (rng.normal(size=T) - 4).astype(np.float32),
        "advantage": rng.normal(size=T).astype(np.float32),
        "kind": rng.integers(0, 2, T).astype(np.int32),
    }
    data["behavior"][~active_T] = -np.inf
    head_VD = (rng.normal(size=(V, D)) * 0.5).astype(np.float32)
    return jax.tree.map(jnp.asarray, (hidden_TD, head_VD, ids_T, active_T, data))


def everything(function, weights):
    """Outputs and gradients in hidden, head and float data of a weighted sum of all outputs.

    What it returns is compiled once for all problems of a size.
    """

    def total(hidden_TD, head_VD, behavior, advantage, ids_T, active_T, kind):
        given = {"behavior": behavior, "advantage": advantage, "kind": kind}
        out = function(hidden_TD, head_VD, ids_T, active_T, given)
        per_token = np.cos(np.arange(len(ids_T)), dtype=np.float32)
        terms = (out.loss, (per_token * out.logprob_T).sum(), (per_token * out.entropy_T).sum())
        # An output with no weight is left out, so that its cotangent is a symbolic zero.
        return sum(w * term for w, term in zip(weights, terms, strict=True) if w), out

    grad = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))

    def run(hidden_TD, head_VD, ids_T, active_T, data):
        floats = data["behavior"], data["advantage"]
        return grad(hidden_TD, head_VD, *floats, ids_T, active_T, data["kind"])

    return run


@functools.cache
def defined(*weights):
    """`everything` of the definition."""
    define = functools.partial(reference.linear_objective, **SUPPORT)
    return everything(lambda *arguments: define(*arguments, objective), weights)


@functools.cache
def implemented(*weights, block_bytes=xla.BLOCK_BYTES, **options):
    """`everything` of the operation with these options, and blocks of the head of this size."""
    options = HeadOptions(**SUPPORT, **options)

    def run(*arguments):
        with mock.patch.object(xla, "BLOCK_BYTES", block_bytes):
            return ops.linear_objective(*arguments, objective, options)

    return everything(run, weights)


JUST_LOSS = (1.7, 0.0, 0.0)
gradients_of = jax.jit(value_and_gradients, static_argnames=("objective", "options"))


def assert_same(actual, expected, **tolerance):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **tolerance), actual, expected)


# Float32 sums of some fifty products in another order.
TIGHT = dict(rtol=2e-5, atol=2e-5)


# Rows of the head in a block, whose last one is shorter; or all rows in one.
ROWS = {8: 1, 16: 4 * 8 * 16, "all": xla.BLOCK_BYTES}


@pytest.mark.parametrize(
    "schedule, chunk_tokens, rows",
    # Every size of chunks and of blocks with each schedule.
    [
        ("fast", None, "all"),
        ("fast", 8, 16),
        ("fast", 1, 8),
        ("lean", None, 8),
        ("lean", 8, "all"),
        ("lean", 1, 16),
    ],
)
def test_value_and_gradients_match_the_definition(schedule, chunk_tokens, rows):
    how = dict(schedule=schedule, chunk_tokens=chunk_tokens, block_bytes=ROWS[rows])
    arguments = problem()
    actual = implemented(*JUST_LOSS, **how)(*arguments)
    assert_same(actual, defined(*JUST_LOSS)(*arguments), **TIGHT)


# Both, and the loss besides, are weighed on meshes (test_on_mesh.py).
@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_cotangent_of_every_output_counts(weights):
    arguments = problem()
    expected = defined(*weights)(*arguments)
    assert np.abs(expected[1][0][np.array(arguments[3])]).max() > 0.1
    actual = implemented(*weights, chunk_tokens=8)(*arguments)
    assert_same(actual, expected, **TIGHT)


def test_gradient_matches_finite_differences_in_float64():
    hidden, head, ids, _, data = jax.tree.map(np.asarray, problem(active=1.0, T=5, V=7))
    head = head.astype(np.float64)

    def loss(hidden):
        z = (hidden @ head.T)[:, :5] / 0.7
        log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
        logprob = log_p[np.arange(5), ids]
        entropy = -(np.exp(log_p) * log_p).sum(1)
        ratio = np.exp(logprob - data["behavior"])
        surrogate = np.minimum(
            ratio * data["advantage"], np.clip(ratio, 0.8, 1.2) * data["advantage"]
        )
        return (-surrogate - 0.1 * data["kind"] * entropy).sum()

    exact = hidden.astype(np.float64)
    expected = np.zeros_like(exact)
    for place in np.ndindex(*exact.shape):
        step = np.zeros_like(exact)
        step[place] = 1e-5
        expected[place] = (loss(exact + step) - loss(exact - step)) / 2e-5
    options = HeadOptions(temperature=0.7, valid_vocab=5, chunk_tokens=2)
    found = gradients_of(hidden, head, ids, None, data, objective, options)
    np.testing.assert_allclose(found.hidden_TD, expected, rtol=2e-4, atol=2e-5)


def test_no_active_token_costs_and_changes_nothing():
    arguments = problem(active=0.0)
    how = dict(schedule="fast", chunk_tokens=8, block_bytes=ROWS[16])
    (_, out), gradients = implemented(*JUST_LOSS, **how)(*arguments)
    assert_same((out, gradients), jax.tree.map(np.zeros_like, (out, gradients)), rtol=0)


def test_chunks_without_an_active_token_are_not_visited():
    arguments = problem(active=0.3)
    options = HeadOptions(chunk_tokens=4, **SUPPORT)
    visited = []

    def counting(logprob_N, entropy_N, data):
        jax.debug.callback(lambda _: visited.append(1), logprob_N.sum(), ordered=False)
        return objective(logprob_N, entropy_N, data)

    jax.block_until_ready(gradients_of(*arguments, counting, options))
    jax.effects_barrier()
    assert len(visited) == -(-int(arguments[3].sum()) // 4)


@pytest.mark.parametrize("impl", ["xla", "pallas_interpret"])
def test_partial_blocks_of_vocabulary_and_tokens_K02(impl, cases):
    given, expected = cases("sharding")["K02"]["input"], cases("sharding")["K02"]["expected"]
    logits = jnp.array(given["logits"])
    data = {"old": jnp.array(given["old_logp"]), "advantage": jnp.array(given["advantages"])}

    def surrogate(logprob, entropy, data):
        ratio = jnp.exp(logprob - data["old"])
        clipped = jnp.clip(ratio, 1 - given["eps_low"], 1 + given["eps_high"])
        return -jnp.minimum(ratio * data["advantage"], clipped * data["advantage"])

    # A head of ones on the diagonal: hidden are the logits, and so are their gradients.
    head = jnp.eye(logits.shape[1])
    options = HeadOptions(impl=impl, chunk_tokens=given["block_tokens"])
    found = gradients_of(logits, head, jnp.array(given["targets"]), None, data, surrogate, options)
    np.testing.assert_allclose(found.scores.logprob, expected["logp"], rtol=1e-5)
    np.testing.assert_allclose(found.scores.logsumexp, expected["logsumexp"], rtol=1e-6)
    np.testing.assert_allclose(
        found.hidden_TD / len(logits), expected["dloss_dlogits"], rtol=2e-5, atol=1e-8
    )


@pytest.mark.parametrize("impl", ["xla", "pallas_tpu"])
@pytest.mark.parametrize("T, at_most", [(8192, 1024), (2048, 512), (300, 300)])
def test_last_chunk_of_a_masked_batch_is_little_padded(impl, T, at_most):
    options = HeadOptions(impl=impl)
    size = lambda masked: chunk_size(T, (32000, 64), jnp.dtype("bfloat16"), options, masked=masked)
    assert size(True) == at_most
    assert size(False) == min(T, 2048)


VISITED = []
"""Sizes of the chunks that `noting` was called for."""


def noting(logprob_N, entropy_N, data):
    note = lambda _: VISITED.append(logprob_N.shape[0])
    jax.debug.callback(note, logprob_N.sum(), ordered=False)
    return objective(logprob_N, entropy_N, data)


@pytest.mark.parametrize(
    "active, sizes",
    [(0, []), (1, [16]), (16, [16]), (17, [32]), (40, [32, 16]), (80, [32, 32, 16])],
)
def test_what_is_left_goes_into_half_a_chunk_where_it_fits(active, sizes):
    hidden, head, ids, _, data = problem(active=1.0, T=80)
    active_T = jnp.asarray(np.random.default_rng(0).permutation(80) < active)
    options = HeadOptions(chunk_tokens=32, **SUPPORT)
    VISITED.clear()
    found = gradients_of(hidden, head, ids, active_T, data, noting, options)
    jax.block_until_ready(found)
    jax.effects_barrier()
    assert sorted(VISITED, reverse=True) == sizes
    (_, expected), gradients = defined(1, 0, 0)(hidden, head, ids, active_T, data)
    np.testing.assert_allclose(found.scores.logprob, expected.logprob_T, **TIGHT)
    assert_same((found.hidden_TD, found.head_VD), gradients[:2], **TIGHT)


def test_head_gradient_is_added_to_what_is_there():
    arguments = problem()
    options = HeadOptions(chunk_tokens=8, **SUPPORT)
    before = jnp.full((V, D), 3.0)
    alone = gradients_of(*arguments, objective, options)
    added = gradients_of(*arguments, objective, options, head_grad_VD=before)
    np.testing.assert_allclose(added.head_VD, alone.head_VD + before, rtol=1e-6, atol=1e-6)


def test_impossible_id_scores_minus_infinity_and_passes_no_gradient():
    hidden, head, _, _, data = problem(active=1.0)
    ids = jnp.full(T, V - 1).at[0].set(-1).at[1].set(3)  # outside the support but for one

    def total(hidden, head):
        out = ops.linear_objective(
            hidden,
            head,
            ids,
            None,
            data,
            lambda logprob, entropy, data: jnp.where(logprob > -jnp.inf, logprob, 0.0),
            HeadOptions(**SUPPORT),
        )
        return out.loss, out.logprob_T

    grad = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, logprob), (d_hidden, d_head) = grad(hidden, head)
    assert np.isfinite(logprob[1]) and np.all(np.delete(logprob, 1) == -np.inf)
    assert np.isfinite(d_head).all() and np.abs(d_hidden[1]).max() > 0
    assert np.all(np.delete(d_hidden, 1, axis=0) == 0)


def test_score_alone_is_what_the_gradient_pass_scores():
    arguments = problem()
    options = HeadOptions(chunk_tokens=8, **SUPPORT)
    alone = jax.jit(score, static_argnums=4)(*arguments[:4], options)
    assert_same(alone, gradients_of(*arguments, objective, options).scores, rtol=1e-6)


def test_bfloat16_operands_keep_float32_sums():
    hidden, head, ids, active, data = problem(active=1.0)
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = defined(*JUST_LOSS)(
        hidden.astype(jnp.float32), head.astype(jnp.float32), ids, active, data
    )
    (_, out), gradients = implemented(*JUST_LOSS)(hidden, head, ids, active, data)
    assert out.logprob_T.dtype == jnp.float32 and gradients[1].dtype == jnp.bfloat16
    # The products are exact and their sums float32: bfloat16 appears in no score.
    assert_same(out, exact[0][1], **TIGHT)
    for actual, expected in zip(gradients[:2], exact[1][:2], strict=True):
        error = np.linalg.norm(actual.astype(np.float32) - expected) / np.linalg.norm(expected)
        assert error < 2**-8  # one rounding of the logits' gradient, one of the result


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(schedule="slow"), "schedule must be one of"),
        (dict(impl="reference"), "impl must be one of"),
        (dict(chunk_tokens=0), "chunk_tokens must be a whole number of at least 1, got 0"),
        (dict(chunk_tokens=2.5), "whole number of at least 1, got 2.5"),
    ],
)
def test_options_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        HeadOptions(**change)


@pytest.mark.parametrize(
    "place, value, message",
    [
        (0, np.zeros((T, D + 1), np.float32), "same width D"),
        (1, np.zeros(D, np.float32), "same width D"),
        (2, np.zeros(T, np.float32), "ids must be integers"),
        (2, np.zeros(T - 1, np.int32), "ids must be integers of shape"),
        (3, np.zeros(T, np.float32), "active must be bool"),
        (4, {"behavior": np.zeros(T - 1)}, "T=37 as first axis"),
        (0, np.zeros((T, D), np.int32), "hidden must be floating point, got int32"),
        (1, np.zeros((V, D), np.int8), "head must be floating point"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(place, value, message):
    arguments = list(problem())
    arguments[place] = value
    with pytest.raises(ValueError, match=message):
        ops.linear_objective(*arguments, objective, HeadOptions())
    with pytest.raises(ValueError, match=message):
        value_and_gradients(*arguments, objective, HeadOptions())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logprob, entropy, data: logprob.mean(),
        lambda logprob, entropy, data: logprob[:, None],
        lambda logprob, entropy, data: logprob.sum()[None],
        lambda logprob, entropy, data: (logprob, entropy),
    ],
)
def test_objective_that_is_not_one_number_for_each_token_is_refused(wrong):
    for call in (ops.linear_objective, value_and_gradients):
        with pytest.raises(ValueError, match=r"one float for each of its tokens, here shape \(37"):
            call(*problem(), wrong, HeadOptions())


@pytest.mark.parametrize("dtype", [np.int8, np.uint32])
def test_ids_of_any_width_mean_the_same(dtype):
    hidden, head, ids, active, data = problem(V=300)
    ids = jnp.where(active, ids % 100, 0)
    given = hidden, head, ids.astype(dtype), active, data
    options = HeadOptions(chunk_tokens=8)
    expected = gradients_of(hidden, head, ids, active, data, objective, options)
    assert_same(gradients_of(*given, objective, options), expected, rtol=0)


def test_support_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="valid_vocab must lie in 1..53"):
        ops.linear_objective(*problem(), objective, HeadOptions(valid_vocab=V + 1))
    with pytest.raises(ValueError, match="need a mesh"):
        ops.linear_objective(*problem(), objective, HeadOptions(), token_axes=("data",))


@pytest.mark.parametrize("schedule", ["fast", "lean"])
@pytest.mark.parametrize("impl", ["xla", "pallas_interpret"])
def test_a_frozen_head_leaves_all_but_its_own_gradient(schedule, impl):
    options = HeadOptions(**SUPPORT, schedule=schedule, impl=impl, chunk_tokens=16)
    arguments = (*problem(), objective)
    whole = value_and_gradients(*arguments, options)
    frozen = value_and_gradients(*arguments, options, frozen_head=True)
    assert frozen.head_VD is None and whole.head_VD is not None
    assert_same(frozen.scores, whole.scores, **TIGHT)
    assert_same(frozen.hidden_TD, whole.hidden_TD, **TIGHT)
    assert np.abs(frozen.hidden_TD).max() > 0.1
