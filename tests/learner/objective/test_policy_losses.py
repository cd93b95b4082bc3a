"""Every policy loss against formulas written out for one token in float64, value and gradient."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.objective import loss as loss_lib

CLIPS = dict(clip_low=0.2, clip_high=0.28, kl_coef=0.0, kl_estimator="k3", entropy_coef=0.0)
OBJECTIVES = {
    "clip": dict(policy_loss="clip"),
    "dual clip": dict(policy_loss="clip", dual_clip=1.5),
    "cispo": dict(policy_loss="cispo"),
    "cispo without a lower bound": dict(policy_loss="cispo", clip_low=1.0, clip_high=4.0),
    "soft gate": dict(policy_loss="soft_gate", gate_positive=1.0, gate_negative=1.05),
    "a soft gate that closes fast": dict(
        policy_loss="soft_gate", gate_positive=3.0, gate_negative=9.0
    ),
}
GAPS = [-1.2, -0.24, -0.1, 0.0, 0.1, 0.26, 0.5, 1.3]
"""log ratios: outside and inside of each bound, on both sides of 1."""


def literal(objective, logprob, weight, advantage):
    """The loss of one token, where `weight` is the ratio that passes no gradient."""
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    ratio = weight if objective.policy_loss == "cispo" else math.exp(logprob[1]) * weight
    if objective.policy_loss == "cispo":
        return -min(max(ratio, low), high) * advantage * logprob[0]
    if objective.policy_loss == "soft_gate":
        t = objective.gate_positive if advantage > 0 else objective.gate_negative
        return -4 / t / (1 + math.exp(-t * (ratio - 1))) * advantage
    gain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if objective.dual_clip is not None and advantage < 0:
        gain = max(gain, objective.dual_clip * advantage)
    return -gain


def slope(objective, logprob, weight, advantage, h=1e-6):
    """Its derivative in the logprob, by differences: the ratio moves with it, the weight not."""
    moved = [literal(objective, (logprob + d, d), weight, advantage) for d in (h, -h)]
    return (moved[0] - moved[1]) / (2 * h)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient(name, sequence):
    objective = loss_lib.Objective(**{**CLIPS, **OBJECTIVES[name]}, sequence_ratio=sequence)
    tokens = [(gap, advantage) for gap in GAPS for advantage in (-1.7, -0.3, 0.0, 0.4, 2.0)]
    gap, advantage = (np.array(each) for each in zip(*tokens, strict=True))
    logprob = -0.5 - np.abs(gap)
    # With a sequence's ratio, what the token's own ratio is must not matter.
    old = np.full_like(logprob, -3.0) if sequence else logprob - gap

    def total(logprob):
        terms = loss_lib.token_terms(
            logprob,
            jnp.zeros_like(logprob),
            jnp.array(old),
            jnp.array(advantage),
            jnp.ones(logprob.shape, bool),
            objective,
            sequence_log_ratio_BT=jnp.array(gap) if sequence else None,
        )
        return terms.loss.sum(), terms

    (_, terms), gradient = jax.value_and_grad(total, has_aux=True)(jnp.array(logprob))
    given = list(zip(logprob, np.exp(gap), advantage, strict=True))
    np.testing.assert_allclose(
        terms.loss, [literal(objective, (x, 0.0), w, A) for x, w, A in given], rtol=2e-6, atol=1e-7
    )
    expected = np.array([slope(objective, *each) for each in given])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    held = np.asarray(terms.clipped_low | terms.clipped_high)
    if objective.policy_loss == "clip":
        np.testing.assert_array_equal(held, (expected == 0) & (advantage != 0))
    if objective.policy_loss == "cispo":
        assert (expected[advantage != 0] != 0).all(), "no token loses its gradient"
        outside = (np.exp(gap) < 1 - objective.clip_low) | (np.exp(gap) > 1 + objective.clip_high)
        np.testing.assert_array_equal(held, outside)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_expected_gradient_is_that_of_the_divergence(estimator):
    """Over a distribution of five tokens, exactly: the sum of p x gradient of the estimate."""
    rng = np.random.default_rng(0)
    logits, reference = jnp.array(rng.normal(size=5)), jax.nn.log_softmax(rng.normal(size=5))

    def divergence(logits):
        logp = jax.nn.log_softmax(logits)
        return (jnp.exp(logp) * (logp - reference)).sum()

    def estimate(logits, token):
        logp = jax.nn.log_softmax(logits)[token]
        return loss_lib.kl_estimate(logp, jnp.asarray(reference)[token], estimator)

    p = jax.nn.softmax(logits)
    expected = sum(p[token] * jax.grad(estimate)(logits, token) for token in range(5))
    np.testing.assert_allclose(expected, jax.grad(divergence)(logits), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_token_that_has_become_impossible_leaves_the_loss_finite(name, advantage):
    objective = loss_lib.Objective(**{**CLIPS, **OBJECTIVES[name]})

    def total(logprob):
        zeros = jnp.zeros_like(logprob)
        terms = loss_lib.token_terms(
            logprob, zeros, zeros - 2.0, zeros + advantage, zeros == 0, objective
        )
        return terms.loss.sum()

    value, slope = jax.value_and_grad(total)(jnp.array([-jnp.inf, -1.0]))
    assert jnp.isfinite(value) and jnp.isfinite(slope).all() and slope[0] == 0
