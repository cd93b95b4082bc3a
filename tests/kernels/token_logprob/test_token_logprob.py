"""The per-token logprob against float64 numpy: values, and the gradient of every output."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.token_logprob import ops

pytestmark = pytest.mark.slow

IMPLS = ["reference", "xla"]
EVERY_IMPL = [*IMPLS, "pallas_interpret"]


def literal(logits, ids, temperature=1.0, valid_vocab=None):
    """logprob, logsumexp and entropy of each row, one Python loop per row, float64."""
    logits = np.asarray(logits, np.float64)
    rows = logits.reshape(-1, logits.shape[-1])[:, :valid_vocab] / temperature
    out = []
    for row, chosen in zip(rows, np.asarray(ids).reshape(-1), strict=True):
        top = row.max()
        logsumexp = top + np.log(np.exp(row - top).sum())
        log_p = row - logsumexp
        possible = log_p[np.isfinite(log_p)]
        entropy = -(np.exp(possible) * possible).sum()
        out.append((log_p[chosen], logsumexp, entropy))
    return np.array(out).T.reshape(3, *logits.shape[:-1])


def literal_gradient(logits, ids, cotangents, temperature=1.0, valid_vocab=None, h=1e-5):
    """Central differences of the cotangent-weighted sum of `literal`, float64."""
    logits = np.asarray(logits, np.float64)

    def scalar(z):
        return (literal(z, ids, temperature, valid_vocab) * cotangents).sum()

    gradient = np.zeros_like(logits)
    for place in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[place] += h
        down[place] -= h
        gradient[place] = (scalar(up) - scalar(down)) / (2 * h)
    return gradient


@functools.cache
def compiled(impl, **options):
    """The outputs, and what pulls their cotangents back: once for all logits of a shape."""

    def outputs(logits, ids):
        return ops.token_logprob(logits, ids, impl=impl, **options)

    def pull(logits, ids, cotangents):
        return jax.vjp(lambda z: tuple(outputs(z, ids)), logits)[1](cotangents)[0]

    return jax.jit(outputs), jax.jit(pull)


def outputs(impl, logits, ids, **options):
    return compiled(impl, **options)[0](logits, ids)


def gradient(impl, logits, ids, cotangents, **options):
    cotangents = tuple(np.asarray(c, np.float32) for c in cotangents)
    return compiled(impl, **options)[1](logits, ids, cotangents)


def sample(shape, V, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (*shape, V)).astype(np.float32)
    return logits, rng.integers(0, V - 2, shape).astype(np.int32), rng.normal(size=(3, *shape))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape, V", [((2, 3), 7), ((5,), 33)])
def test_values_and_every_gradient_match_float64(impl, shape, V):
    logits, ids, cotangents = sample(shape, V)
    options = dict(temperature=0.7, valid_vocab=V - 1)
    actual = outputs(impl, logits, ids, **options)
    np.testing.assert_allclose(
        np.array(actual), literal(logits, ids, **options), rtol=1e-5, atol=1e-5
    )
    for output in range(3):
        # One output at a time, so that a wrong term of one cannot hide behind another.
        weighted = np.where(np.arange(3).reshape(3, *[1] * len(shape)) == output, cotangents, 0)
        np.testing.assert_allclose(
            gradient(impl, logits, ids, weighted, **options),
            literal_gradient(logits, ids, weighted, **options),
            rtol=1e-4,
            atol=2e-6,
        )


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_logits_keep_float32_statistics(impl):
    # The inputs are rounded once, here; what follows must not round again. A running sum in
    # bfloat16 would be off by about 0.01 at this width.
    logits, ids, cotangents = sample((4,), 5000)
    rounded = logits.astype(ml_dtypes.bfloat16)
    actual = outputs(impl, rounded, ids)
    assert all(out.dtype == jnp.float32 for out in actual)
    np.testing.assert_allclose(np.array(actual), literal(rounded, ids), rtol=1e-5, atol=1e-5)
    exact = gradient(impl, rounded.astype(np.float32), ids, cotangents)
    stored = gradient(impl, rounded, ids, cotangents)
    assert stored.dtype == jnp.bfloat16
    # One rounding of the result: 8 bits of significand.
    stored = np.asarray(stored).astype(np.float32)
    np.testing.assert_allclose(stored, exact, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("impl", EVERY_IMPL)
def test_partial_vocabulary_block_K02(impl, cases):
    case = cases("sharding")["K02"]
    given, expected = case["input"], case["expected"]
    ids = jnp.array(given["targets"])
    old, advantage = jnp.array(given["old_logp"]), jnp.array(given["advantages"])

    def loss(logits):
        logprob = ops.token_logprob(logits, ids, impl=impl).logprob
        ratio = jnp.exp(logprob - old)
        clipped = jnp.clip(ratio, 1 - given["eps_low"], 1 + given["eps_high"])
        return -jnp.minimum(ratio * advantage, clipped * advantage).mean()

    logits = jnp.array(given["logits"])
    out = outputs(impl, logits, ids)
    np.testing.assert_allclose(out.logprob, expected["logp"], rtol=1e-5)
    np.testing.assert_allclose(out.logsumexp, expected["logsumexp"], rtol=1e-6)
    value, grad = jax.jit(jax.value_and_grad(loss))(logits)
    np.testing.assert_allclose(value, expected["token_mean_loss"], rtol=1e-5)
    np.testing.assert_allclose(grad, expected["dloss_dlogits"], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["L04", "L10"])
def test_completion_is_scored_by_the_token_before_it(impl, name, cases):
    case = cases("loss")[name]
    logits, ids = np.float32(case["input"]["logits"]), np.int32(case["input"]["ids"])
    first, temperature = case["input"]["prompt_len"], case["input"]["temperature"]
    out = outputs(impl, logits[first - 1 : -1], ids[first:], temperature=temperature)
    np.testing.assert_allclose(out.logprob, case["expected"]["completion_logprobs"], rtol=2e-6)


@pytest.mark.parametrize("impl", EVERY_IMPL)
def test_padded_vocabulary_is_outside_the_normaliser_S06(impl, cases):
    case = cases("sampling")["S06"]
    logits, size = np.float32(case["input"]["logits"]), case["input"]["tokenizer_size"]
    token = np.int32(case["expected"]["greedy_token"])
    expected = case["expected"]["logprob_over_real_vocab"]
    out = outputs(impl, logits, token, valid_vocab=size)
    np.testing.assert_allclose(out.logprob, expected, rtol=1e-5)
    logits[size:] = np.inf
    out = outputs(impl, logits, token, valid_vocab=size)
    np.testing.assert_allclose(out.logprob, expected, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("outside", [-1, 4, 5, 1000])
def test_id_outside_the_support_is_impossible_and_passes_no_gradient(impl, outside):
    logits = np.float32([0.5, 1.0, -0.5, 0.0, 3.0])
    options = dict(valid_vocab=4)
    out = outputs(impl, logits, np.int32(outside), **options)
    assert out.logprob == -jnp.inf
    np.testing.assert_allclose(out.entropy, literal(logits, 0, 1.0, 4)[2], rtol=1e-5)
    grad = gradient(impl, logits, np.int32(outside), (1.0, 0.0, 0.0), **options)
    np.testing.assert_array_equal(grad, np.zeros(5))


@pytest.mark.parametrize("impl", EVERY_IMPL)
def test_minus_infinity_logits_act_as_absent_columns(impl):
    logits = np.float32([0.5, -np.inf, 1.0, -np.inf])
    out = outputs(impl, logits, np.int32(2))
    expected = literal(np.array([0.5, 1.0]), 1)
    np.testing.assert_allclose(np.array(out), expected, rtol=1e-5)
    grad = gradient(impl, logits, np.int32(2), (0.3, 0.5, 0.7))
    small = gradient(impl, np.float32([0.5, 1.0]), np.int32(1), (0.3, 0.5, 0.7))
    np.testing.assert_allclose(grad, [small[0], 0, small[1], 0], rtol=1e-5)
    impossible = outputs(impl, logits, np.int32(1))
    assert impossible.logprob == -jnp.inf
    np.testing.assert_array_equal(gradient(impl, logits, np.int32(1), (1.0, 0.0, 0.0)), 0)


@pytest.mark.parametrize("impl", EVERY_IMPL)
def test_row_without_support_is_finite_where_it_can_be(impl):
    logits = np.full(4, -np.inf, np.float32)
    out = outputs(impl, logits, np.int32(1))
    assert (out.logprob, out.logsumexp, out.entropy) == (-np.inf, -np.inf, 0.0)
    np.testing.assert_array_equal(gradient(impl, logits, np.int32(1), (1.0, 1.0, 1.0)), 0)


@pytest.mark.parametrize("impl", EVERY_IMPL)
def test_broken_logits_are_not_hidden(impl):
    logits = np.float32([0.5, np.nan, 1.0, 0.0])
    assert np.isnan(outputs(impl, logits, np.int32(0)).logprob)
    # XLA's maximum on a CPU passes over the NaN of a row like the last of these.
    rows = np.zeros((24, 304), np.float32)
    rows[23], rows[23, 200] = -np.inf, np.nan
    out = map(np.asarray, outputs(impl, rows, np.full(24, 200, np.int32)))
    assert all(np.isnan(each[23]) and np.isfinite(each[:23]).all() for each in out)


def test_ids_of_a_narrow_type_mean_the_same():
    logits, _, _ = sample((3,), 304)
    ids = np.int32([0, 100, 255])
    expected = outputs("xla", logits, ids)
    actual = outputs("xla", logits, ids.astype(np.uint8))
    np.testing.assert_array_equal(np.array(actual), np.array(expected))


@pytest.mark.parametrize("impl", EVERY_IMPL)
def test_no_tokens_have_no_logprobs(impl):
    out = outputs(impl, np.zeros((3, 0, 9), np.float32), np.zeros((3, 0), np.int32))
    assert all(each.shape == (3, 0) for each in out)


def test_large_logits_do_not_overflow_the_entropy():
    logits = np.float32([3000.0, 2999.0, -3000.0, -3000.0])
    expected = literal(logits, 0)
    np.testing.assert_allclose(np.array(outputs("xla", logits, np.int32(0))), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(temperature=0.0), "above 0"),
        (dict(temperature=1e-40), "at least 1e-06, got 1e-40"),
        (dict(temperature=np.inf), "must be finite"),
        (dict(valid_vocab=2.5), "valid_vocab must be a whole number, got 2.5"),
        (dict(valid_vocab=True), "valid_vocab must be a whole number"),
        (dict(minor="rows"), "minor must be vocab, time or None"),
        (dict(valid_vocab=9), r"1\.\.5"),
        (dict(impl="fast"), "fast"),
    ],
)
def test_unusable_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ops.token_logprob(jnp.zeros((2, 5)), jnp.zeros(2, jnp.int32), **change)
    with pytest.raises(ValueError, match="floating point, got int32"):
        ops.token_logprob(jnp.zeros((2, 5), jnp.int32), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="take bfloat16 and float32, got float16"):
        ops.token_logprob(
            jnp.zeros((2, 5), jnp.float16), jnp.zeros(2, jnp.int32), impl="pallas_tpu"
        )
    with pytest.raises(ValueError, match="one per row"):
        ops.token_logprob(jnp.zeros((2, 5)), jnp.zeros(3, jnp.int32))


def test_jit_compiles_without_gather_or_scatter():
    def total(logits, ids):
        return sum(x.sum() for x in ops.token_logprob(logits, ids, impl="xla"))

    logits, ids, _ = sample((3,), 17)
    text = jax.jit(jax.grad(total)).lower(jnp.asarray(logits), jnp.asarray(ids)).as_text()
    assert "gather" not in text and "scatter" not in text
