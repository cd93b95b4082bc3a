"""What goes into the engine and what comes out of it: token ids, keys and settings, never text.

Dimension key:
    T: tokens
"""

import dataclasses
import enum

import numpy as np

from services.wire.messages import FinishReason

LEAST_TOP_P = 1e-9
"""Smaller values are too close to 0 for float32 sums of probabilities."""


class OnSwap(enum.Enum):
    """What the engine does with rows that are being decoded when the policy changes."""

    FINISH = "finish"
    """They end under the version they began with; the swap waits for them."""
    RESTART = "restart"
    """Their tokens are discarded and drawn again."""
    CONTINUE = "continue"
    """They keep their tokens and go on under the new version, which computes all keys and values
    again; the version of each token is recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The distribution from which a request's tokens are drawn."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Only the k most likely ids; 0 is off."""
    top_p: float = 1.0
    """Only the most likely ids that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Only ids at least this fraction as likely as the most likely one; 0 is off."""

    def __post_init__(self):
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")
        if self.top_p < LEAST_TOP_P:
            raise ValueError(
                f"top_p must be at least {LEAST_TOP_P:g}, got {self.top_p:g}: temperature=0 takes "
                "the most likely id"
            )
        if not isinstance(self.top_k, int) or not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k must be a whole number, at least 0 (0 is off) and below 2**31, got "
                f"{self.top_k}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """One prompt and the completions to draw for it. Its ids are part of the random keys."""

    request_id: str
    """Unique among the requests in the engine."""
    token_ids: np.ndarray
    """int32 [T], T >= 1."""
    prompt_id: int
    epoch: int
    samples: tuple[int, ...]
    """Sample index of each completion."""
    max_new_tokens: int
    key_data: np.ndarray
    """uint32 [2]: `jax.random.key_data` of the run's key, or of the evaluation's."""
    sampling: SamplingSettings = SamplingSettings()
    stop_ids: tuple[int, ...] | None = None
    """A completion ends with any of these, which it keeps; None takes the engine's."""
    stop_set: int = 0
    """Index of a stop set of the engine's stop automaton; set 0 has no stop strings."""
    episode: str | None = None
    """Name that all turns of an episode share. When a completion of it has ended, its keys and
    values are parked under the name and the sample index, for a request of that one sample whose
    prompt begins with the same tokens: only what follows them is prefilled. None parks nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRow:
    """One completion that has ended."""

    request_id: str
    sample_index: int
    token_ids: np.ndarray
    """int32 [T]; empty only where it was aborted before its first token."""
    logprobs: np.ndarray
    """float32 [T]: natural log of the probability each id was drawn with."""
    versions: np.ndarray
    """int32 [T]: policy version that drew each token."""
    finish_reason: FinishReason
    segment_tokens: tuple[int, ...] = ()
    """Of an episode of several turns, as `Completion` has it: logprobs and versions are then those
    of the model's tokens alone."""
    record_starts: tuple[int, ...] = ()
    """As `Completion` has them."""
