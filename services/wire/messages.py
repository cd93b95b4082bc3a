"""What crosses a process boundary as data: groups of completions, and weight manifests.

Frozen records of numpy arrays. The codecs of weights and trajectories turn them into protobuf and
back; nothing here knows gRPC, JAX or files.
"""

import dataclasses
import enum
import itertools
from typing import NamedTuple

import numpy as np

NO_VERSION = -1
"""The current policy version before the first one is published and issued."""


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    """By a limit: of its tokens, or of the turns of an episode."""
    ABORTED = "aborted"


class PushOutcome(enum.Enum):
    """The outcome of a push; after either the worker may drop the group."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


class Record(NamedTuple):
    """One sequence of a completion, as the model read and sampled it, the prompt included."""

    token_ids: np.ndarray
    """int32 [N]."""
    is_sampled: np.ndarray
    """Bool [N]: whether the model sampled the token."""
    behavior_logprobs: np.ndarray
    """float32, one for each token that it sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion; when finish_reason is STOP, its last token is a stop token or
    completes a stop string.
    """

    sample_index: int
    """Place in the group, from 0; enters the random key."""
    token_ids: np.ndarray
    """int32 [T], T >= 1: exactly the ids that were sampled, with those of an environment between
    them as the model read them."""
    behavior_logprobs: np.ndarray
    """float32 [M]: natural log of the probability each of the model's tokens was drawn with; M is
    T where there is no environment."""
    finish_reason: FinishReason
    rewards: dict[str, float]
    """Raw value of every scorer (and its logged variants, such as `gsm8k_answer/lenient`)."""
    total_reward: float
    """Weighted sum; NaN exactly when reward_error is not empty."""
    reward_error: str = ""
    """Name and message of the scorer that failed; such a completion does not count in its group."""
    segment_tokens: tuple[int, ...] = ()
    """Tokens of each segment of an episode: the model's and the environment's in turn, the first
    and the last the model's. Empty where the model sampled all tokens."""
    record_starts: tuple[int, ...] = ()
    """Places of the segments that begin a new record, since the chat template wrote earlier turns
    in another way than before: such a segment, one of the environment's, is the whole conversation
    up to the next turn."""

    @property
    def model_tokens(self) -> int:
        """Tokens that the model sampled."""
        return len(self.behavior_logprobs)

    @property
    def is_sampled(self) -> np.ndarray:
        """Bool [T]: whether the model sampled the token; an environment wrote the others."""
        if not self.segment_tokens:
            return np.ones(len(self.token_ids), bool)
        return np.repeat(np.arange(len(self.segment_tokens)) % 2 == 0, self.segment_tokens)

    @property
    def turns(self) -> int:
        """Turns of the model."""
        return (len(self.segment_tokens) + 1) // 2 or 1

    @property
    def record_model_tokens(self) -> int:
        """Tokens that the model sampled in that record in which they are the most."""
        if not self.record_starts:
            return self.model_tokens
        cuts = [0, *self.record_starts, len(self.segment_tokens)]
        return max(
            sum(self.segment_tokens[place] for place in range(start, end) if place % 2 == 0)
            for start, end in itertools.pairwise(cuts)
        )

    def records(self, prompt_token_ids: np.ndarray) -> list[Record]:
        """The sequences that the model was given and went on with: one, and one more for each time
        that earlier turns were written in another way.

        Args:
            prompt_token_ids: int32 [P], of the group.
        """
        ends = np.cumsum(self.segment_tokens, dtype=np.int64)
        cuts = [0, *(int(ends[place - 1]) for place in self.record_starts), len(self.token_ids)]
        is_sampled, done, found = self.is_sampled, 0, []
        for start, end in itertools.pairwise(cuts):
            prompt = np.zeros(0, np.int32) if start else prompt_token_ids
            own = is_sampled[start:end]
            count = int(own.sum())
            found.append(
                Record(
                    np.concatenate([prompt, self.token_ids[start:end]]).astype(np.int32),
                    np.concatenate([np.zeros(len(prompt), bool), own]),
                    self.behavior_logprobs[done : done + count],
                )
            )
            done += count
        return found

    def check_segments(self) -> None:
        """Checks that the segments are the model's and the environment's in turn, that records
        begin with one of the environment's, and that each token of the model has a logprob.

        Raises:
            ValueError: with the numbers and the rule.
        """
        segments, T = self.segment_tokens, len(self.token_ids)
        if segments and (len(segments) < 3 or len(segments) % 2 == 0):
            raise ValueError(
                f"an episode has 3, 5, .. segments, of which the first and the last are the "
                f"model's, or none where the model sampled all tokens; got {len(segments)}"
            )
        if segments and (min(segments) < 1 or sum(segments) != T):
            raise ValueError(
                f"the segments of a completion of {T} tokens must have at least 1 token each and "
                f"{T} together, got {min(segments)} at least and {sum(segments)} together"
            )
        starts = self.record_starts
        if any(place % 2 == 0 or place >= len(segments) or place < 1 for place in starts) or any(
            one >= next_one for one, next_one in itertools.pairwise(starts)
        ):
            raise ValueError(
                f"record_starts are places of the environment's segments, odd and ascending, below "
                f"{len(segments)}; got {list(starts)}"
            )
        sampled = sum(segments[::2]) if segments else T
        logprobs = self.behavior_logprobs
        if logprobs.dtype != np.float32 or logprobs.shape != (sampled,):
            raise ValueError(
                f"behavior_logprobs must be float32 with one value for each of the {sampled} "
                f"token_ids that were sampled, got {logprobs.dtype} {logprobs.shape}"
            )

    @property
    def disagreements(self) -> dict[str, bool]:
        """Whether the variants `strict` and `lenient` differ, by scorer that has both."""
        scorers = [n.removesuffix("/strict") for n in self.rewards if n.endswith("/strict")]
        return {
            scorer: self.rewards[f"{scorer}/strict"] != self.rewards[f"{scorer}/lenient"]
            for scorer in scorers
            if f"{scorer}/lenient" in self.rewards
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """All completions of one prompt, sampled under one policy version."""

    run_id: str
    group_id: str
    attempt: int
    """0 for the first lease of this group; a re-lease after a lost worker counts up."""
    prompt_id: int
    epoch: int
    policy_version: int
    weight_digest: str
    """Receipt: tree digest that the worker computed from its live arrays, hex."""
    worker: str
    prompt_token_ids: np.ndarray
    """int32 [P], P >= 1."""
    completions: tuple[Completion, ...]
    phase_s: dict[str, float]
    """Worker seconds by ledger phase from the arrival of the lease until the group was complete.
    Groups are decoded side by side: the same second is in each of them, so sums mean nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a policy version, as it lies on the wire."""

    name: str
    """Hugging Face tensor name."""
    dtype: str
    """numpy or ml_dtypes name: `bfloat16`, `float32`."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the version's flat byte stream."""
    nbytes: int
    checksum: str
    """sha256 of the tensor's bytes, hex."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Canary:
    """A fixed probe of B sequences of T tokens, and what the learner makes of it."""

    token_ids: np.ndarray
    """int32 [B, T]."""
    logprobs: np.ndarray
    """float32 [B, T - 1]: of every token but the first of its sequence, at temperature 1."""
    fingerprints: np.ndarray
    """float32 [L + 1, B, 2]: of the hidden states, as models/probe.py defines them."""
    precision: str
    """What the learner's matrix products round to, `bfloat16` or `float32`: it bounds how far
    healthy sides may differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """Everything needed to fetch and verify one policy version."""

    run_id: str
    policy_version: int
    tensors: tuple[TensorSpec, ...]
    """In stream order: sorted by name, without gaps."""
    digest: str
    """Tree digest: sha256 over name, dtype, shape and checksum of every tensor, hex."""
    canary: Canary | None = dataclasses.field(default=None, compare=False)
    """None where the publisher ran no probe. The digest does not cover it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the version's stream."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """The right, and the duty, of one worker to produce one group."""

    group_id: str
    attempt: int
    epoch: int
    position: int
    """Of the prompt in the training set that every process loads alike."""
    min_policy_version: int = 0
    """Oldest policy version that the group may be sampled under."""
    logged: bool = False
    """Whether the first completion is wanted for samples.jsonl."""
