"""Runs the learner's jitted functions: each compiled once for each shape, with its time booked, and
the scoring of sequences among them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from learner.compiled_functions import LearnerFunctions
from learner.objective.batching import MicroBatch, Packing, TrainSequence, unpack
from models.transformer import Params
from services.process.phase_clock import PhaseClock

Model = Literal["policy", "reference", "teacher", "critic"]


class ProgramRunner:
    """The compiled programs of a learner, by the name of the function and the shapes it takes."""

    def __init__(self):
        self.compiled: dict[str, jax.stages.Compiled] = {}
        self.ended = 0
        """Programs that have ended, such as one for each micro-batch: they show that it works."""

    def run(self, clock: PhaseClock, phase: str, key: str, function: Any, *args: Any) -> Any:
        """Calls a jitted function and waits for its results."""
        started = self.start(clock, phase, key, function, *args)
        with clock.phase(phase):
            ended = jax.block_until_ready(started)
        self.ended += 1
        return ended

    def start(self, clock: PhaseClock, phase: str, key: str, function: Any, *args: Any) -> Any:
        """Calls a jitted function; a new shape is compiled first, in the phase `compile`.

        Args:
            clock: gets the seconds, in the phase named and in `compile`.
            key: of the function and the shapes of its arguments.
        """
        if key not in self.compiled:
            with clock.phase("compile"):
                self.compiled[key] = function.lower(*args).compile()
        with clock.phase(phase):
            return self.compiled[key](*args)


class Scorer:
    """Scores packed sequences, in the phase `forward_backward`."""

    def __init__(
        self,
        functions: LearnerFunctions,
        programs: ProgramRunner,
        packing: Packing,
        params: Callable[[Model], Params],
    ):
        """Args:
        params: of a model as it stands now.
        """
        self._functions = functions
        self._programs = programs
        self._packing = packing
        self._params = params

    def logprobs(
        self,
        sequences: Sequence[TrainSequence],
        batches: Sequence[MicroBatch],
        clock: PhaseClock,
        model: Model = "policy",
    ) -> list[np.ndarray]:
        """Logprobs of the tokens of each sequence.

        Args:
            batches: the sequences, packed.
        """
        scores = [self._score(model, batch, clock) for batch in batches]
        return unpack(scores, sequences, self._packing)

    def logprobs_and_values(
        self, sequences: Sequence[TrainSequence], batches: Sequence[MicroBatch], clock: PhaseClock
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Logprobs of each sequence, and what the critic expects at each of its tokens."""
        scores = [self._score("critic", batch, clock) for batch in batches]
        logprobs, values = (
            unpack(arrays, sequences, self._packing) for arrays in zip(*scores, strict=True)
        )
        return logprobs, values

    def _score(self, model: Model, batch: MicroBatch, clock: PhaseClock) -> Any:
        """Logprobs [B, T] on the host; of the critic logprobs and values."""
        made = self._functions
        tokens = jax.device_put(batch.tokens_only, made.batch_sharding)
        key = f"score {model} {tokens.token_ids.shape}"
        score = {
            "policy": made.score,
            "reference": made.score_reference,
            "teacher": made.score_teacher,
            "critic": made.score_values,
        }[model]
        params = self._params(model)
        return jax.device_get(
            self._programs.run(clock, "forward_backward", key, score, params, tokens)
        )
