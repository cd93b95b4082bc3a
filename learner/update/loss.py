"""The GRPO objective, token by token, and how token terms become one number.

A token term is a function of that token's logprob alone. The *old* policy is the one that the
ratio is taken against and clipped around: the behaviour policy that sampled, or with truncated
token weights the learner's own before the update (off_policy.py). Aggregation is a weight
per token (`token_weight`, made on the host with the batch) and one denominator for the whole
batch, so that any split into micro-batches or devices sums to the same loss.

Dimension key:
    B: rows
    T: tokens
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp, in nats: far outside any clip, far from overflow."""


class Objective(NamedTuple):
    """The coefficients of the loss; static while a step is compiled."""

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: str
    entropy_coef: float


class TokenTerms(NamedTuple):
    """What every token contributes, float32 [B, T] each; only active tokens mean anything."""

    loss: jax.Array
    """To be minimised: policy term + kl_coef KL - entropy_coef entropy."""
    clipped_low: jax.Array
    """bool: held at 1 - clip_low, which happens only with a negative advantage."""
    clipped_high: jax.Array
    """bool: held at 1 + clip_high, which happens only with a positive advantage."""
    kl: jax.Array
    """Estimate of KL(policy || reference) in nats; zeros without a reference."""


def importance_ratio(logprob: jax.Array, old_logprob: jax.Array) -> jax.Array:
    """Exp of the float32 log-ratio, which is clamped first; outside the clamp the slope is 0."""
    log_ratio = logprob.astype(jnp.float32) - old_logprob.astype(jnp.float32)
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_estimate(logprob: jax.Array, reference_logprob: jax.Array, estimator: str) -> jax.Array:
    """Per-token estimate of KL(policy || reference) from a token that the policy sampled.

    Source: J. Schulman, "Approximating KL divergence" (2020): with d = log reference - log policy,
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. The derivative is that of the expression; note
    that the expected derivative of k1 is zero, so k1 reports a KL but does not hold it.

    Returns:
        float32, in nats.

    Raises:
        ValueError: if the estimator is unknown.
    """
    d = jnp.clip(
        reference_logprob.astype(jnp.float32) - logprob.astype(jnp.float32),
        -MAX_LOG_RATIO,
        MAX_LOG_RATIO,
    )
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return jnp.exp(d) - d - 1.0
    raise ValueError(f"kl_estimator must be k1, k2 or k3, got {estimator!r}")


def token_terms(
    logprob_BT: jax.Array,
    entropy_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    active_BT: jax.Array,
    objective: Objective,
    reference_logprob_BT: jax.Array | None = None,
) -> TokenTerms:
    """The clipped surrogate of PPO (arXiv:1707.06347, equation 7) with separate bounds, and extras.

    Args:
        logprob_BT: float32, differentiated; nats, of the tempered distribution.
        entropy_BT: float32, differentiated; nats.
        old_logprob_BT: float32; nats, under the old policy.
        advantage_BT: float32; the advantage of the completion, at each of its tokens, times the
            token's importance weight.
        active_BT: bool; what lies elsewhere is replaced before any arithmetic, so that garbage
            there reaches neither value nor gradient.
        reference_logprob_BT: float32; None where no reference policy is kept.

    Returns:
        TokenTerms.
    """
    logprob_BT = jnp.where(active_BT, logprob_BT, 0.0)
    entropy_BT = jnp.where(active_BT, entropy_BT, 0.0)
    old_logprob_BT = jnp.where(active_BT, old_logprob_BT, 0.0)
    advantage_BT = jnp.where(active_BT, advantage_BT, 0.0)

    ratio_BT = importance_ratio(logprob_BT, old_logprob_BT)
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    plain_BT = ratio_BT * advantage_BT
    clipped_BT = jnp.clip(ratio_BT, low, high) * advantage_BT
    loss_BT = -jnp.where(plain_BT <= clipped_BT, plain_BT, clipped_BT)

    kl_BT = jnp.zeros_like(loss_BT)
    if reference_logprob_BT is not None:
        reference_logprob_BT = jnp.where(active_BT, reference_logprob_BT, 0.0)
        kl_BT = kl_estimate(logprob_BT, reference_logprob_BT, objective.kl_estimator)
        loss_BT += objective.kl_coef * kl_BT
    if objective.entropy_coef:
        loss_BT -= objective.entropy_coef * entropy_BT
    return TokenTerms(
        loss=loss_BT,
        clipped_low=(ratio_BT < low) & (advantage_BT < 0),
        clipped_high=(ratio_BT > high) & (advantage_BT > 0),
        kl=kl_BT,
    )


def weighted_sum(term_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
    """Sum of weight x term over the tokens with a weight; the others cannot poison it."""
    return jnp.where(weight_BT > 0, weight_BT * term_BT, 0.0).sum()


def metric_sums(
    terms: TokenTerms, entropy_BT: jax.Array, active_BT: jax.Array
) -> dict[str, jax.Array]:
    """Sums over the active tokens, float32 scalars, to be added up over the batch.

    Divide by `active_tokens` for the mean of any other.
    """

    def total(value_BT):
        return jnp.where(active_BT, value_BT.astype(jnp.float32), 0.0).sum()

    return {
        "active_tokens": active_BT.astype(jnp.float32).sum(),
        "kl": total(terms.kl),
        "entropy": total(entropy_BT),
        "clipped_low": total(terms.clipped_low),
        "clipped_high": total(terms.clipped_high),
    }


def token_weight(active_tokens: int, aggregation: str) -> float:
    """Weight of each active token of a sequence.

    `token_mean` and `constant` weigh every token alike; `seq_mean` every sequence.
    """
    if aggregation == "seq_mean":
        return 1.0 / active_tokens
    if aggregation in ("token_mean", "constant"):
        return 1.0
    raise ValueError(f"aggregation must be token_mean, seq_mean or constant, got {aggregation!r}")


def denominator(
    active_tokens: int, sequences: int, aggregation: str, max_completion_tokens: int
) -> float:
    """What the weighted sum over the WHOLE batch is divided by, once.

    Args:
        active_tokens: tokens with a weight, over all micro-batches and devices.
        sequences: completions with at least one such token.
        max_completion_tokens: the constant of Dr. GRPO (arXiv:2503.20783).
    """
    per_batch = {
        "token_mean": active_tokens,
        "seq_mean": sequences,
        "constant": sequences * max_completion_tokens,
    }
    if aggregation not in per_batch:
        raise ValueError(f"aggregation must be one of {sorted(per_batch)}, got {aggregation!r}")
    return float(per_batch[aggregation])
