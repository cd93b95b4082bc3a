"""The objective, token by token, and how token terms become one number.

A token term is a function of that token's logprob alone. The *old* policy is the one that the
ratio is taken against and clipped around: the behaviour policy that sampled, or with truncated
token weights the learner's own before the update (off_policy.py). The ratio of a whole sequence is
a number that is known before (sequence_ratio.py). Aggregation is a weight
per token (`token_weight`, made on the host with the batch) and one denominator for the whole
batch, so that any split into micro-batches or devices sums to the same loss.

Dimension key:
    B: rows
    T: tokens
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

PolicyLoss = Callable[..., jax.Array]
"""A user's own policy term: see own_policy_loss.py."""

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp, in nats: far outside any clip, far from overflow."""


class Objective(NamedTuple):
    """The coefficients of the loss; static while a step is compiled."""

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: str
    entropy_coef: float
    policy_loss: str | PolicyLoss = "clip"
    """`clip`, `cispo` or `soft_gate`, or a user's function."""
    sequence_ratio: bool = False
    """Whether the ratio is that of the whole sequence, at each of its tokens."""
    dual_clip: float | None = None
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    value_coef: float = 0.0
    """Of the critic's loss, where there is one."""
    value_clip: float | None = None


class TokenTerms(NamedTuple):
    """What every token contributes, float32 [B, T] each; only active tokens mean anything."""

    loss: jax.Array
    """To be minimised: policy term + kl_coef KL - entropy_coef entropy."""
    clipped_low: jax.Array
    """bool: held at 1 - clip_low. With `clip` the token has no policy gradient then, and its
    advantage is negative; with `cispo` it is the weight that is held."""
    clipped_high: jax.Array
    """bool: held at 1 + clip_high, with a positive advantage under `clip`; or by dual_clip."""
    kl: jax.Array
    """Estimate of KL(policy || reference) in nats; zeros without a reference."""


def importance_ratio(logprob: jax.Array, old_logprob: jax.Array) -> jax.Array:
    """Exp of the float32 log-ratio, which is clamped first; outside the clamp the slope is 0."""
    log_ratio = logprob.astype(jnp.float32) - old_logprob.astype(jnp.float32)
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_estimate(logprob: jax.Array, reference_logprob: jax.Array, estimator: str) -> jax.Array:
    """Per-token estimate of KL(policy || reference) from a token that the policy sampled.

    Source: J. Schulman, "Approximating KL divergence" (2020): with d = log reference - log policy,
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. The derivatives of k2 and k3 are those of the
    expressions: in expectation, of KL(policy || reference) for k2, and of KL(reference || policy)
    for k3. The expected derivative of the expression k1 is zero, so that it would hold nothing: k1
    has the derivative of k2. Source: Tang and Munos, arXiv:2506.09477.

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
        half_square = 0.5 * d * d
        return half_square + jax.lax.stop_gradient(-d - half_square)
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
    sequence_log_ratio_BT: jax.Array | None = None,
    entropy_coef_BT: jax.Array | None = None,
) -> TokenTerms:
    """The policy term of each token, with the KL penalty and the entropy bonus.

    With the ratio r = policy / old and the advantage A, the policy term is

    * `clip`: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). PPO, arXiv:1707.06347, equation 7;
      with a negative A at most -dual_clip A (arXiv:1912.09729, equation 5).
    * `cispo`: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy, where sg passes no gradient:
      no token loses its own. MiniMax-M1, arXiv:2506.13585, equation 4.
    * `soft_gate`: -4/t sigmoid(t (r - 1)) A, where t is gate_positive for A > 0, else
      gate_negative. SAPO, arXiv:2511.20347.

    With `sequence_ratio`, r is s (policy / sg(policy)) for the s of the sequence: its value at
    every token, with the derivative of GSPO-token, which is that of GSPO where the advantage is one
    for the sequence. arXiv:2507.18071, equations 7 and 14.

    Args:
        logprob_BT: float32, differentiated; nats, of the tempered distribution.
        entropy_BT: float32, differentiated; nats.
        old_logprob_BT: float32; nats, under the old policy.
        advantage_BT: float32; the advantage of each token, times its importance weight.
        active_BT: bool; what lies elsewhere is replaced before any arithmetic, so that garbage
            there reaches neither value nor gradient.
        reference_logprob_BT: float32; None where no reference policy is kept.
        sequence_log_ratio_BT: float32, log s of each token's sequence; for `sequence_ratio`.
        entropy_coef_BT: float32; in place of the objective's coefficient, where it is adaptive.

    Returns:
        TokenTerms.
    """
    logprob_BT = jnp.where(active_BT, logprob_BT, 0.0)
    entropy_BT = jnp.where(active_BT, entropy_BT, 0.0)
    old_logprob_BT = jnp.where(active_BT, old_logprob_BT, 0.0)
    advantage_BT = jnp.where(active_BT, advantage_BT, 0.0)

    if sequence_log_ratio_BT is None:
        ratio_BT = importance_ratio(logprob_BT, old_logprob_BT)
    else:
        sequence_log_ratio_BT = jnp.where(active_BT, sequence_log_ratio_BT, 0.0)
        now_BT = jax.lax.stop_gradient(logprob_BT)
        ratio_BT = importance_ratio(sequence_log_ratio_BT, jnp.zeros_like(now_BT))
        ratio_BT *= importance_ratio(logprob_BT, now_BT)
    if callable(objective.policy_loss):
        loss_BT = objective.policy_loss(
            logprob=logprob_BT,
            old_logprob=old_logprob_BT,
            ratio=ratio_BT,
            advantage=advantage_BT,
            entropy=entropy_BT,
        )
        held_low_BT = held_high_BT = jnp.zeros_like(active_BT)
    else:
        loss_BT, held_low_BT, held_high_BT = _POLICY_TERMS[objective.policy_loss](
            ratio_BT, advantage_BT, logprob_BT, objective
        )

    kl_BT = jnp.zeros_like(loss_BT)
    if reference_logprob_BT is not None:
        reference_logprob_BT = jnp.where(active_BT, reference_logprob_BT, 0.0)
        kl_BT = kl_estimate(logprob_BT, reference_logprob_BT, objective.kl_estimator)
        loss_BT += objective.kl_coef * kl_BT
    if entropy_coef_BT is not None:
        loss_BT -= entropy_coef_BT * entropy_BT
    elif objective.entropy_coef:
        loss_BT -= objective.entropy_coef * entropy_BT
    return TokenTerms(
        loss=loss_BT,
        clipped_low=held_low_BT,
        clipped_high=held_high_BT,
        kl=kl_BT,
    )


def _bounds(objective):
    return 1.0 - objective.clip_low, 1.0 + objective.clip_high


def _clip(ratio_BT, advantage_BT, logprob_BT, objective):
    low, high = _bounds(objective)
    plain_BT = ratio_BT * advantage_BT
    clipped_BT = jnp.clip(ratio_BT, low, high) * advantage_BT
    gain_BT = jnp.where(plain_BT <= clipped_BT, plain_BT, clipped_BT)
    held_high_BT = (ratio_BT > high) & (advantage_BT > 0)
    if objective.dual_clip is not None:
        worst_BT = objective.dual_clip * advantage_BT
        held_BT = (advantage_BT < 0) & (gain_BT < worst_BT)
        gain_BT, held_high_BT = jnp.where(held_BT, worst_BT, gain_BT), held_high_BT | held_BT
    return -gain_BT, (ratio_BT < low) & (advantage_BT < 0), held_high_BT


def _cispo(ratio_BT, advantage_BT, logprob_BT, objective):
    low, high = _bounds(objective)
    weight_BT = jax.lax.stop_gradient(jnp.clip(ratio_BT, low, high))
    # A token that has become impossible has no gradient, and 0 x infinity must not be.
    logprob_BT = jnp.where(jnp.isneginf(logprob_BT), 0.0, logprob_BT)
    return -weight_BT * advantage_BT * logprob_BT, ratio_BT < low, ratio_BT > high


def _soft_gate(ratio_BT, advantage_BT, logprob_BT, objective):
    t_BT = jnp.where(advantage_BT > 0, objective.gate_positive, objective.gate_negative)
    gate_BT = 4.0 / t_BT * jax.nn.sigmoid(t_BT * (ratio_BT - 1.0))
    never_BT = jnp.zeros_like(ratio_BT, bool)
    return -gate_BT * advantage_BT, never_BT, never_BT


_POLICY_TERMS = {"clip": _clip, "cispo": _cispo, "soft_gate": _soft_gate}
"""The policy term of each token, and whether it is held at the lower or the upper bound."""
POLICY_LOSSES = tuple(_POLICY_TERMS)


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
        sequences: completions with at least one such token; an episode is one, whatever the number
            of its records.
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
