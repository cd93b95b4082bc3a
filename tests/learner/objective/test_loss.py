"""Loss value and gradient against the public cases and float64 numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.objective import loss as loss_lib

pytestmark = pytest.mark.slow

AGGREGATIONS = {"seq_mean": "seq_mean", "token_mean": "token_mean", "constant": "dr_grpo"}


def make_objective(given, **changes):
    options = dict(
        clip_low=given.get("eps_low", 0.2),
        clip_high=given.get("eps_high", 0.2),
        kl_coef=given.get("beta", 0.0),
        kl_estimator="k3",
        entropy_coef=0.0,
    )
    return loss_lib.Objective(**{**options, **changes})


def weights_of(mask, aggregation):
    return np.array(
        [[m * loss_lib.token_weight(int(sum(row)), aggregation) for m in row] for row in mask],
        np.float32,
    )


def batch_loss(logprob, given, aggregation, **changes):
    """Loss of the case's batch as one piece, and its terms."""
    mask = np.array(given["mask"])
    weight = weights_of(mask, aggregation)
    reference = given.get("ref_logp")
    terms = loss_lib.token_terms(
        logprob,
        jnp.zeros_like(logprob),
        jnp.array(given["old_logp"]),
        jnp.broadcast_to(jnp.array(given["advantages"])[:, None], mask.shape),
        mask > 0,
        make_objective(given, **changes),
        None if reference is None else jnp.array(reference),
    )
    divisor = loss_lib.denominator(
        int(mask.sum()), int(mask.any(1).sum()), aggregation, given["max_len"]
    )
    return loss_lib.weighted_sum(terms.loss, weight) / divisor, terms


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["L01", "L02", "L05"])
def test_loss_and_gradient(name, aggregation, cases):
    case = cases("loss")[name]
    expected = case["expected"][AGGREGATIONS[aggregation]]
    (value, terms), gradient = jax.value_and_grad(batch_loss, has_aux=True)(
        jnp.array(case["input"]["logp"]), case["input"], aggregation
    )
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient, expected["dloss_dlogp"], rtol=1e-5, atol=1e-7)

    active = np.array(case["input"]["mask"]) > 0
    sums = loss_lib.metric_sums(terms, jnp.zeros(active.shape), active)
    metrics, tokens = case["expected"]["metrics"], sums["active_tokens"]
    assert tokens == metrics["active_tokens"]
    np.testing.assert_allclose(sums["clipped_low"] / tokens, metrics["clip_low_fraction"])
    np.testing.assert_allclose(sums["clipped_high"] / tokens, metrics["clip_high_fraction"])
    np.testing.assert_allclose(sums["kl"] / tokens, metrics["mean_kl"], rtol=1e-5, atol=1e-7)


def test_any_split_sums_to_the_same_loss_L09(cases):
    case = cases("loss")["L09"]
    parts = [np.array(p) for p in case["input"]["token_losses"]]
    masks = [np.array(m) for m in case["input"]["masks"]]
    tokens, sequences = sum(int(m.sum()) for m in masks), sum(len(m) for m in masks)
    for aggregation in ("token_mean", "seq_mean"):
        divisor = loss_lib.denominator(tokens, sequences, aggregation, 3)
        split = sum(
            loss_lib.weighted_sum(jnp.array(part), weights_of(mask, aggregation))
            for part, mask in zip(parts, masks, strict=True)
        )
        rows = sum(
            loss_lib.weighted_sum(jnp.array(row), weights_of([mask], aggregation)[0])
            for part, rows_mask in zip(parts, masks, strict=True)
            for row, mask in zip(part, rows_mask, strict=True)
        )
        for total in (split, rows):
            np.testing.assert_allclose(total / divisor, case["expected"][aggregation], rtol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_and_their_gradients(estimator):
    logprob, reference = np.array([-0.2, -1.5]), np.array([-0.9, -0.6])
    d = reference - logprob
    value = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[estimator]
    slope = {"k1": -d, "k2": -d, "k3": 1 - np.exp(d)}[estimator]
    estimate = lambda x: loss_lib.kl_estimate(x, jnp.array(reference), estimator)
    actual, vjp = jax.vjp(estimate, jnp.array(logprob))
    np.testing.assert_allclose(actual, value, rtol=1e-5)
    np.testing.assert_allclose(vjp(jnp.ones(2))[0], slope, rtol=1e-5)
    with pytest.raises(ValueError, match="k4"):
        loss_lib.kl_estimate(jnp.zeros(1), jnp.zeros(1), "k4")


def test_entropy_bonus_lowers_the_loss_with_its_true_gradient():
    objective = make_objective({}, entropy_coef=0.01)
    zeros = jnp.zeros((1, 2))

    def total(entropy):
        terms = loss_lib.token_terms(zeros, entropy, zeros, zeros, zeros == 0, objective)
        return loss_lib.weighted_sum(terms.loss, jnp.ones((1, 2))) / 2

    value, gradient = jax.value_and_grad(total)(jnp.array([[1.0, 3.0]]))
    np.testing.assert_allclose(value, -0.02, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-0.005, -0.005]], rtol=1e-6)


def test_garbage_outside_the_completion_reaches_neither_value_nor_gradient():
    given = {
        "mask": [[1, 0, 0]],
        "old_logp": [[-1.0, np.inf, np.nan]],
        "ref_logp": [[-1.2, -np.inf, np.nan]],
        "advantages": [0.5],
        "beta": 0.1,
        "max_len": 3,
    }
    logprob = jnp.array([[-0.9, -np.inf, np.nan]])
    (value, _), gradient = jax.value_and_grad(batch_loss, has_aux=True)(
        logprob, given, "token_mean"
    )
    d = -1.2 + 0.9
    ratio = np.exp(0.1)
    expected = -ratio * 0.5 + 0.1 * (np.exp(d) - d - 1)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-ratio * 0.5 + 0.1 * (1 - np.exp(d)), 0, 0]], rtol=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logprob", [-500.0, 0.0, -np.inf])
def test_wild_ratios_stay_finite(logprob, advantage):
    given = {
        "mask": [[1]],
        "old_logp": [[-200.0 if logprob == 0 else -0.1]],
        "advantages": [advantage],
        "max_len": 1,
    }
    (value, _), gradient = jax.value_and_grad(batch_loss, has_aux=True)(
        jnp.array([[logprob]]), given, "token_mean"
    )
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="mean_of_means"):
        loss_lib.token_weight(3, "mean_of_means")
    with pytest.raises(ValueError, match="mean_of_means"):
        loss_lib.denominator(3, 1, "mean_of_means", 4)
