"""The section `eval`, and each held-out set with what it has of its own."""

import dataclasses

from pydantic import Field, model_validator

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.config.reward_config import RewardConfig
from rollout_worker.engine.decode_request import SamplingSettings
from services.process.config_section import Section


class EvalConfig(Section):
    """Held-out evaluation on data.eval. Where that has several sets, each may have its own of the
    keys from samples_per_prompt on.
    """

    every_steps: int = Field(default=0, ge=0)
    """0 evaluates only at start and end, as the next two keys say."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    beside_training: bool = True
    """Where rollout.max_staleness is above 0 and learner and workers have processes of their own,
    training goes on during an evaluation between the first step and the last. Its prompts are
    completed by workers that have nothing else to do, under the version of its step, which each
    worker keeps on its devices so long; its result is in the metrics of the step in which it is
    complete. Training waits for it before the next one is due."""
    prompts: int | None = Field(default=None, ge=1)
    """Number of prompts, from the start of each set; null takes all."""
    samples_per_prompt: int = Field(default=1, ge=1, le=65_536)
    """Completions of each held-out prompt."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Only the k most likely tokens are drawn; 0 is off."""
    top_p: float = Field(default=1.0, ge=1e-9, le=1)
    """Only the most likely tokens that together have this probability; 1 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this fraction as likely as the most likely one; 0 is off."""
    pass_k: tuple[int, ...] = (1,)
    """Values of k for which pass@k is reported; each at most samples_per_prompt."""
    correct_from: float | None = Field(default=None, allow_inf_nan=False)
    """A held-out completion is right if the first of reward.functions gives it at least this. null
    takes 1, and reports no accuracy and no pass@k where a completion gets more than 1."""

    @property
    def sampling(self) -> SamplingSettings:
        """As the decode engine takes it."""
        return SamplingSettings(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    @model_validator(mode="after")
    def _check(self):
        too_many = [k for k in self.pass_k if not 1 <= k <= self.samples_per_prompt]
        if too_many:
            raise ValueError(
                f"eval.pass_k={list(self.pass_k)} must lie between 1 and "
                f"samples_per_prompt={self.samples_per_prompt}"
            )
        if 0 < self.temperature < 0.01:
            raise ValueError(
                f"eval.temperature={self.temperature:g} must be 0 (greedy) or at least 0.01"
            )
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.samples_per_prompt={self.samples_per_prompt} at temperature 0 gives equal "
                "samples: set eval.temperature above 0 or samples_per_prompt to 1"
            )
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutSet:
    """One held-out set, and how it is evaluated."""

    key: str
    """How messages name it."""
    name: str
    """In logs and metrics; empty for a set that is no list."""
    source: SourceConfig
    rules: EvalConfig
    reward: RewardConfig

    @property
    def scorer(self) -> str:
        """The reward function that decides what is right."""
        return self.reward.functions[0].name

    def used_prompts(self, found: int) -> int:
        """How many prompts are evaluated of those that fit."""
        return min(self.rules.prompts or found, found)
