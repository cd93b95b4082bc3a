"""The configuration of supervised training, `python -m learner.sft`, and rules that span it.

`driver/config/load_config.py` reads YAML and `--set` into it. The sections `model`, `data`,
`learner` and `checkpoint` are those of a run of reinforcement learning.
"""

from typing import Literal

from pydantic import Field, model_validator

from driver.config.sections.checkpoint import CheckpointConfig
from driver.config.sections.log import TrackersConfig
from driver.config.sections.model import ModelSection
from driver.config.sections.run import NamedRun
from learner.config import LearnerConfig
from rollout_worker.config.data_config import DataConfig
from services.process.config_section import Section


class SftRun(NamedRun):
    """What the training is called, how long it is, and where it writes."""

    name: str = Field(default="sft", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the output folder: letters, digits, `.`, `_` and `-`."""
    steps: int | None = Field(default=None, ge=1, le=10**9)
    """Updates of the whole training, those before a resume included; null follows from epochs."""
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """Passes over the records of data.train; null is one where steps is null too. The last step is
    filled from the next pass."""

    @model_validator(mode="after")
    def _check(self):
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs:g} both say how long to train: set "
                "one of them to null"
            )
        return self


class BatchConfig(Section):
    """The records of one update."""

    sequences_per_step: int = Field(default=32, ge=1, le=1_000_000)
    """Records of one update; its loss is the mean over all their tokens that train."""
    max_tokens: int = Field(default=1024, ge=2, le=2**23)
    """Longest record with prompt and answer, up to the last token that trains. A longer one is left
    out and counted: no record is cut."""
    shuffle: bool = True
    """Give each epoch an order of its own, which follows from run.seed; false takes the records of
    each source as they stand there, such as from easy to hard."""


class HeldOutConfig(Section):
    """The loss on data.eval."""

    every_steps: int = Field(default=0, ge=0)
    """0 measures it only at start and end, as the next two keys say."""
    at_start: bool = True
    """Measure before the first step."""
    at_end: bool = True
    """Measure after the last step."""


class SftPlacement(Section):
    """Where the training runs: in the process that is started, on all of its devices."""

    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """Accelerator that it needs; it never falls back to another platform."""


class SftConfig(Section):
    """One training: `python -m learner.sft --config sft.yaml --set section.key=value`."""

    run: SftRun = SftRun()
    model: ModelSection
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    learner: LearnerConfig = LearnerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: HeldOutConfig = HeldOutConfig()
    placement: SftPlacement = SftPlacement()
    log: TrackersConfig = TrackersConfig()

    @model_validator(mode="after")
    def _check(self):
        if self.learner.longest_row < self.batch.max_tokens:
            raise ValueError(
                f"{self.learner.say_longest_row} cannot hold one "
                f"record of batch.max_tokens={self.batch.max_tokens} tokens: raise it or lower "
                "batch.max_tokens"
            )
        if self.learner.updates_per_batch != 1:
            raise ValueError(
                f"learner.updates_per_batch={self.learner.updates_per_batch} is for reinforcement "
                "learning: leave it out, and set run.epochs to pass over the records again"
            )
        if self.learner.lora is not None:
            raise ValueError(
                "learner.lora trains an adapter by reinforcement learning, and supervised training "
                "has none: leave it out"
            )
        if self.data.curriculum is not None:
            raise ValueError(
                "data.curriculum skips prompts by the rewards of their groups, and there are "
                "none here: leave it out"
            )
        if self.eval.every_steps and self.data.eval is None:
            raise ValueError(
                f"eval.every_steps={self.eval.every_steps} but data.eval is not set: set it to the "
                "held-out records, or eval.every_steps to 0"
            )
        return self
