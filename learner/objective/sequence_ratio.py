"""The importance ratio of a whole sequence, which GSPO takes in place of that of each token.

s = exp(mean of log policy - log old over the tokens of the sequence in the loss), the policy being
the one that is about to be updated. GSPO, arXiv:2507.18071, equation 7. It is worked out on the
host before each update, from a forward pass over the batch: sequences may be packed as they like.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from learner.objective.batching import Selection


def with_sequence_ratios(selection: Selection, logprobs: Sequence[np.ndarray]) -> Selection:
    """The selection with the log ratio of each of its sequences.

    Args:
        logprobs: [N] of each sequence, float32, nats, under the policy that is updated; only those
            of tokens in the loss are read.
    """
    sequences = []
    for sequence, logprob_N in zip(selection.sequences, logprobs, strict=True):
        now, old = logprob_N[sequence.active], sequence.old_logprobs[sequence.active]
        with np.errstate(invalid="ignore"):
            log_ratio = float((now.astype(np.float64) - old).mean())
        sequences.append(dataclasses.replace(sequence, log_ratio=log_ratio))
    return dataclasses.replace(selection, sequences=tuple(sequences))
