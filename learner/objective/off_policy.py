"""Off-policy correction: how far the policy has moved from the one that sampled, and its remedy.

Three policies meet in an update: the behaviour policy mu, whose logprobs were recorded as the
tokens were drawn; the old policy, the learner's before the first update on the batch; and the
policy that trains. The importance weight of a token is w = old / mu. It is not 1 where the group
waited for newer versions, or where sampler and learner round differently.

Without a correction the clipped ratio of PPO is policy / mu, so that w sits inside the clip. There
are two corrections, each optional:

* Truncated token weights. The ratio becomes policy / old, clipped around 1, and the policy term is
  multiplied by the constant min(w, C). Sources: decoupled PPO (Hilton et al., arXiv:2110.00641, and
  AReaL, arXiv:2505.24298, section 5.2); truncation at C (IMPALA, arXiv:1802.01561, section 4.1; Yao
  et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025). The KL
  penalty and the entropy bonus are not weighted.
* A sequence mask. A sequence is left out whole unless the geometric mean of its weights,
  exp(mean log w), lies within the bounds, which belong to it. Sources: GSPO (arXiv:2507.18071,
  equation 7) for the mean; Liu, Li et al., "When speed kills stability", 2025, for the mask. It is
  a rejection: a masked sequence counts in no denominator, as one of another group would.

Runs on the host in float64 on a few numbers per token, sequence by sequence, so that packing and
devices change nothing.

Dimension key:
    N: input tokens of one sequence
    T: tokens of one sequence that are in the loss
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from learner.objective.batching import Selection, SelectionRules, TrainSequence, sum_up
from learner.objective.loss import MAX_LOG_RATIO


class Correction(NamedTuple):
    """The bounds on weights; None where there is none. See OffPolicyConfig."""

    token_truncate: float | None = None
    sequence_low: float | None = None
    sequence_high: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether any bound is set."""
        return any(bound is not None for bound in self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceWeights:
    """The importance weights of one sequence; float64 [T]."""

    old_logprob_T: np.ndarray
    log_weight_T: np.ndarray
    """Not clamped."""
    raw_T: np.ndarray
    """exp of log_weight_T, which is clamped first."""
    truncated_T: np.ndarray
    geometric_mean: float
    """Of the weights before any clamp or truncation; itself clamped before exp."""
    is_kept: bool


def weigh_sequence(
    sequence: TrainSequence, logprob_N: np.ndarray, correction: Correction
) -> SequenceWeights:
    """Weighs the tokens of one sequence.

    A logprob that is NaN makes its weight NaN, which no bound masks: the update that it enters is
    not finite, and is skipped and reported as any other such update. An infinite one is clamped.

    Args:
        logprob_N: float32, nats, under the policy before the update; only those of active tokens
            are read.
    """
    old_logprob_T = logprob_N[sequence.active].astype(np.float64)
    with np.errstate(invalid="ignore"):
        log_weight_T = old_logprob_T - sequence.behavior_logprobs[sequence.active]
        raw_T = _exp(log_weight_T)
        geometric_mean = float(_exp(log_weight_T.mean()))
    low, high = correction.sequence_low, correction.sequence_high
    return SequenceWeights(
        old_logprob_T=old_logprob_T,
        log_weight_T=log_weight_T,
        raw_T=raw_T,
        truncated_T=np.minimum(raw_T, correction.token_truncate or np.inf),
        geometric_mean=geometric_mean,
        is_kept=not (
            (low is not None and geometric_mean < low)
            or (high is not None and geometric_mean > high)
        ),
    )


def correct_selection(
    selection: Selection,
    weights: Sequence[SequenceWeights],
    correction: Correction,
    rules: SelectionRules,
) -> Selection:
    """The selection that trains: masked sequences left out, the others' tokens weighted.

    Args:
        weights: of each sequence of the selection, in its order.

    Returns:
        A selection with a denominator of its own. A group all of whose sequences were masked ends
        as `dropped_stale`.
    """
    kept = [
        _weighted(sequence, its) if correction.token_truncate is not None else sequence
        for sequence, its in zip(selection.sequences, weights, strict=True)
        if its.is_kept
    ]
    left = {sequence.group_id for sequence in kept}
    gone = {sequence.group_id for sequence in selection.sequences} - left
    return sum_up(
        kept,
        rules,
        outcomes=selection.outcomes | dict.fromkeys(gone, "dropped_stale"),
        zero_variance_groups=selection.zero_variance_groups,
    )


def off_policy_metrics(
    weights: Sequence[SequenceWeights], correction: Correction
) -> dict[str, float]:
    """Weights, and gaps |log w| in nats, before and after the correction, per token and sequence.

    `raw` weights and the gaps without a word are of all sequences as sampled. `kept` is what the
    correction leaves: truncated weights, of the sequences that are not masked; absent without a
    correction, or where it leaves nothing. The gap of a sequence is the mean over its tokens.

    Args:
        weights: of at least one sequence.
    """
    metrics = {
        **_spread("is_weight_raw", np.concatenate([w.raw_T for w in weights])),
        **_spread("sequence_weight_raw", [w.geometric_mean for w in weights]),
        **_gaps("logprob_gap", [np.abs(w.log_weight_T) for w in weights]),
    }
    if not correction.is_on:
        return metrics
    tokens = [len(w.raw_T) for w in weights]
    truncated = [int((w.truncated_T < w.raw_T).sum()) for w in weights]
    is_masked = np.array([not w.is_kept for w in weights])
    metrics |= {
        "offpolicy/token_share_truncated": sum(truncated) / sum(tokens),
        "offpolicy/sequence_share_truncated": float(np.mean(np.array(truncated) > 0)),
        "offpolicy/token_share_masked": float(np.dot(tokens, is_masked)) / sum(tokens),
        "offpolicy/sequence_share_masked": float(is_masked.mean()),
    }
    kept_T = [w.truncated_T for w in weights if w.is_kept]
    if not kept_T:
        return metrics
    log_kept_T = [np.log(w_T) for w_T in kept_T]
    return {
        **metrics,
        **_spread("is_weight_kept", np.concatenate(kept_T)),
        **_spread("sequence_weight_kept", [np.exp(log_T.mean()) for log_T in log_kept_T]),
        **_gaps("logprob_gap_kept", [np.abs(log_T) for log_T in log_kept_T]),
    }


def _weighted(sequence: TrainSequence, its: SequenceWeights) -> TrainSequence:
    old_logprobs, importance = sequence.old_logprobs.copy(), sequence.importance.copy()
    old_logprobs[sequence.active] = its.old_logprob_T
    importance[sequence.active] = its.truncated_T
    return dataclasses.replace(sequence, old_logprobs=old_logprobs, importance=importance)


def _exp(log_weight: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_weight, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _spread(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {
        f"offpolicy/{name}_mean": float(np.mean(values)),
        f"offpolicy/{name}_min": float(np.min(values)),
        f"offpolicy/{name}_max": float(np.max(values)),
    }


def _gaps(name: str, gaps: Sequence[np.ndarray]) -> dict[str, float]:
    tokens, of_sequences = np.concatenate(gaps), [gap_T.mean() for gap_T in gaps]
    return {
        f"offpolicy/{name}_mean": float(tokens.mean()),
        f"offpolicy/{name}_max": float(tokens.max()),
        f"offpolicy/{name}_sequence_mean": float(np.mean(of_sequences)),
        f"offpolicy/{name}_sequence_max": float(np.max(of_sequences)),
    }
