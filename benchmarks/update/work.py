"""What both sides of the comparison train on: a model, and one batch drawn from a seed."""

import pathlib
from typing import Literal, NamedTuple

import numpy as np


class Work(NamedTuple):
    """One update, again and again."""

    model: pathlib.Path
    """HF folder that both sides load."""
    dtype: Literal["float32", "bfloat16"]
    """Of activations and products; weights, gradients and moments are float32."""
    groups: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    microbatch_tokens: int
    learning_rate: float
    seed: int

    @property
    def rows(self) -> int:
        """Sequences of the batch."""
        return self.groups * self.group_size

    @property
    def row_tokens(self) -> int:
        """Of a sequence, the prompt's included."""
        return self.prompt_tokens + self.completion_tokens


class Batch(NamedTuple):
    """Random tokens and rewards.

    Dimension key: B sequences, group by group; T tokens of a sequence.
    """

    token_ids_BT: np.ndarray
    """int32; a prompt is the same throughout its group."""
    rewards_B: np.ndarray
    """float64."""


def draw(work: Work, vocab_size: int) -> Batch:
    """The batch of a seed."""
    rng = np.random.default_rng(work.seed)
    shape = (work.rows, work.row_tokens)
    token_ids_BT = rng.integers(0, vocab_size, shape, dtype=np.int32)
    first_B = np.arange(work.rows) // work.group_size * work.group_size
    token_ids_BT[:, : work.prompt_tokens] = token_ids_BT[first_B, : work.prompt_tokens]
    return Batch(token_ids_BT, rng.random(work.rows))
