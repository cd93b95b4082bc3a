"""The learner's own update of a batch."""

import jax

from benchmarks.transfer.optimizer_delta import logprobs_of
from benchmarks.update.work import Work, draw
from learner.config import (
    AlgorithmConfig,
    LearnerConfig,
    OptimizerConfig,
    TrainingSettings,
)
from learner.core import LearnerCore
from models.files.checkpoint import load_model
from services.process.phase_clock import PhaseClock
from services.wire.messages import Completion, FinishReason, Group


class OurUpdate:
    """A learner as a run has it, without its services."""

    def __init__(self, work: Work):
        loaded = load_model(str(work.model))
        settings = TrainingSettings(
            algorithm=AlgorithmConfig(),
            learner=LearnerConfig(
                microbatch_tokens=work.microbatch_tokens,
                compute_dtype=work.dtype,
                remat="none",
                optimizer=OptimizerConfig(learning_rate=work.learning_rate),
            ),
            total_steps=10**6,
            temperature=1.0,
            valid_vocab=None,
            max_completion_tokens=work.completion_tokens,
        )
        self._core = LearnerCore(settings, loaded.config, loaded.params, devices=jax.devices()[:1])
        self._work = work
        self._batch = draw(work, loaded.config.vocab_size)
        logprobs = logprobs_of(self._core, loaded, self._batch.token_ids_BT, work.group_size)
        self._old_logprobs_BC = logprobs[:, work.prompt_tokens - 1 :]

    def step(self) -> float:
        """Makes one update; returns the gradient's norm before the clip."""
        groups = [self._group(number) for number in range(self._work.groups)]
        return self._core.update(groups, PhaseClock())["train/grad_norm"]

    def _group(self, number: int) -> Group:
        work, batch = self._work, self._batch
        first = number * work.group_size
        return Group(
            run_id="bench",
            group_id=f"{self._core.policy_version}-{number}",
            attempt=0,
            prompt_id=number,
            epoch=0,
            policy_version=self._core.policy_version,
            weight_digest="",
            worker="bench",
            prompt_token_ids=batch.token_ids_BT[first, : work.prompt_tokens],
            completions=tuple(
                Completion(
                    sample_index=index,
                    token_ids=batch.token_ids_BT[first + index, work.prompt_tokens :],
                    behavior_logprobs=self._old_logprobs_BC[first + index],
                    finish_reason=FinishReason.LENGTH,
                    rewards={},
                    total_reward=float(batch.rewards_B[first + index]),
                )
                for index in range(work.group_size)
            ),
            phase_s={},
        )
