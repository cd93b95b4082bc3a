"""Advantages of tokens from a critic's values: generalised advantage estimation (GAE).

A completion is an episode and its tokens are the actions. The value of a token is the critic's
estimate, before the token is drawn, of the discounted rewards that are still to come. The reward of
the completion is paid at its last token, whatever ended it: a completion that was cut by its length
ends there too, without a value for what would have followed, as in TRL and verl. A KL penalty in
the reward is paid token by token (InstructGPT, arXiv:2203.02155, equation 2).

Runs on the host in float64 over whole sequences, once before the first update on a batch, so that
devices, micro-batches and packing change nothing and all updates on the batch have one target.

Dimension key:
    N: input tokens of one sequence
    T: completion tokens of one sequence, those in the loss
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from learner.config import AlgorithmConfig
from learner.objective.batching import Selection, TrainSequence
from learner.objective.loss import MAX_LOG_RATIO


class GaeRule(NamedTuple):
    """How values and rewards become advantages; see AlgorithmConfig."""

    gamma: float
    gae_lambda: float
    eps: float
    """Keeps the division by the advantages' deviation finite."""
    kl_coef: float = 0.0
    """Of the penalty in the reward; 0 where there is none."""

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> "GaeRule":
        """The rule that a configuration sets."""
        return cls(
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            eps=algorithm.advantage_eps,
            kl_coef=algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0,
        )


def gae_advantages(
    reward_T: np.ndarray, value_T: np.ndarray, *, gamma: float, gae_lambda: float
) -> np.ndarray:
    """How much better each token was than the critic expected; float64 [T].

    A_t = sum over l >= 0 of (gamma lambda)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t,
    where the value after the last token is 0. Source: arXiv:1506.02438, equation 16.

    Args:
        reward_T: float64; paid for each token.
        value_T: float64; before each token is drawn.
    """
    delta_T = reward_T + gamma * np.append(value_T[1:], 0.0) - value_T
    backwards = itertools.accumulate(
        reversed(delta_T.tolist()), lambda later, delta: delta + gamma * gae_lambda * later
    )
    return np.array(list(backwards), np.float64)[::-1]


def estimate_advantages(
    selection: Selection,
    values: Sequence[np.ndarray],
    rule: GaeRule,
    reference_logprobs: Sequence[np.ndarray] | None = None,
) -> tuple[Selection, dict[str, float]]:
    """Gives each token its advantage, and the critic what it should have said.

    Advantages are whitened over all tokens in the loss of the batch: less their mean, divided by
    their standard deviation (ddof 0) + eps. Returns, the critic's targets, are the advantages
    before that plus the values.

    Args:
        selection: at least one sequence.
        values: float32 [N] of each sequence, under the critic before the update; only those of
            tokens in the loss are read.
        reference_logprobs: float32 [N], nats, of each sequence; only where `kl_coef` is above 0.

    Returns:
        The selection with advantages, values and returns, and metrics: `train/value_mean`,
        `train/explained_variance` (1 - variance of returns - values / variance of returns; absent
        where all returns are equal), and with a penalty `train/kl`, the mean of log sampled - log
        reference per token, nats.
    """
    kl = [np.zeros(int(sequence.active.sum())) for sequence in selection.sequences]
    if rule.kl_coef:
        assert reference_logprobs is not None
        kl = [
            _log_ratio(sequence, reference_N)
            for sequence, reference_N in zip(selection.sequences, reference_logprobs, strict=True)
        ]
    kept = zip(selection.sequences, values, strict=True)
    before = [value_N[sequence.active].astype(np.float64) for sequence, value_N in kept]
    advantages = []
    for sequence, value_T, kl_T in zip(selection.sequences, before, kl, strict=True):
        reward_T = -rule.kl_coef * kl_T
        reward_T[-1] += sequence.reward
        advantages.append(
            gae_advantages(reward_T, value_T, gamma=rule.gamma, gae_lambda=rule.gae_lambda)
        )
    every, value = np.concatenate(advantages), np.concatenate(before)
    mean, deviation = every.mean(), every.std() + rule.eps
    sequences = tuple(
        dataclasses.replace(
            sequence,
            advantages=_at_tokens(sequence, (advantage_T - mean) / deviation),
            values=_at_tokens(sequence, value_T),
            returns=_at_tokens(sequence, advantage_T + value_T),
        )
        for sequence, advantage_T, value_T in zip(
            selection.sequences, advantages, before, strict=True
        )
    )
    metrics = _metrics(value, every + value)
    if rule.kl_coef:
        metrics["train/kl"] = float(np.concatenate(kl).mean())
    return dataclasses.replace(selection, sequences=sequences), metrics


def _log_ratio(sequence: TrainSequence, reference_N: np.ndarray) -> np.ndarray:
    """Log sampled - log reference of each token in the loss, float64 [T], clamped."""
    active = sequence.active
    with np.errstate(invalid="ignore"):
        log_ratio_T = sequence.behavior_logprobs[active].astype(np.float64) - reference_N[active]
    return np.clip(log_ratio_T, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _at_tokens(sequence: TrainSequence, each_T: np.ndarray) -> np.ndarray:
    """float32 [N], 0 where a token is not in the loss."""
    array_N = np.zeros(len(sequence.token_ids), np.float32)
    array_N[sequence.active] = each_T
    return array_N


def _metrics(value: np.ndarray, target: np.ndarray) -> dict[str, float]:
    metrics = {"train/value_mean": float(value.mean())}
    if target.var() > 0:
        metrics["train/explained_variance"] = float(1.0 - (target - value).var() / target.var())
    return metrics
