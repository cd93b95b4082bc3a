"""What a teacher changes in the advantages of a batch.

In the form `sampled` the teacher's part of the loss is an advantage of each token: coef times log
teacher - log sampled, the negative of an estimate of KL(sampled || teacher) from the one token. The
gradient of the policy term is that of the divergence in expectation, token by token: what a token
does to later ones does not count. On-policy distillation, Thinking Machines Lab (2025); the sum
over the vocabulary, in the forms `full` and `top_k`, is in the loss itself
(kernels/linear_distillation).

Dimension key:
    N: input tokens of one sequence
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from learner.objective.batching import Selection, TrainSequence
from learner.objective.loss import MAX_LOG_RATIO


def weigh_advantages(selection: Selection, coef: float) -> Selection:
    """The selection with the advantages that rewards made, times a coefficient."""
    weighed = lambda s: dataclasses.replace(s, advantages=np.float32(coef) * s.advantages)
    return dataclasses.replace(selection, sequences=tuple(map(weighed, selection.sequences)))


def add_teacher(
    selection: Selection, teacher_logprobs: Sequence[np.ndarray], coef: float
) -> tuple[Selection, float]:
    """Adds the teacher's advantage to each token in the loss.

    Args:
        teacher_logprobs: [N] of each sequence, in order; float32, nats, of the tempered
            distribution. Only those of tokens in the loss are read.
        coef: weight of the divergence.

    Returns:
        The selection, and the mean of log sampled - log teacher over the tokens in the loss, nats;
        NaN without one. Each is bounded by MAX_LOG_RATIO.
    """
    sequences, total, tokens = [], 0.0, 0
    for sequence, logprob_N in zip(selection.sequences, teacher_logprobs, strict=True):
        divergence_N = _divergence(sequence, logprob_N)
        advantages_N = (sequence.advantages - coef * divergence_N).astype(np.float32)
        sequences.append(dataclasses.replace(sequence, advantages=advantages_N))
        total, tokens = total + divergence_N.sum(), tokens + int(sequence.active.sum())
    mean = float(total / tokens) if tokens else float("nan")
    return dataclasses.replace(selection, sequences=tuple(sequences)), mean


def _divergence(sequence: TrainSequence, teacher_logprob_N: np.ndarray) -> np.ndarray:
    """Of log sampled - log teacher, float64 [N]; 0 where a token is not in the loss."""
    gap_N = sequence.behavior_logprobs.astype(np.float64) - teacher_logprob_N
    return np.where(sequence.active, np.clip(gap_N, -MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
