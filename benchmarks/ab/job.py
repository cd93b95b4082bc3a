"""Job and result of a child process of an A/B comparison; plain JSON both ways."""

import dataclasses
from typing import Any


class WrongInput(ValueError):
    """An argument that cannot work; the message has the value, the rule and the fix."""


class RunFailed(RuntimeError):
    """A training run did not come to its end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way through the head and the loss."""

    lm_head: str
    loss_impl: str

    @property
    def name(self) -> str:
        """As `--impl` has it."""
        return f"{self.lm_head}:{self.loss_impl}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training run over recorded steps, in a process of its own."""

    rollouts: str
    model: str
    implementation: Implementation
    others: tuple[Implementation, ...]
    """All that will be asked for, so that the first process refuses what a later one could not."""
    learner: dict[str, Any]
    """The `learner` section, without the implementation."""
    steps: int
    """How many of the recorded steps, from the first."""
    snapshot_steps: tuple[int, ...]
    """Steps after which the parameters are written down."""
    snapshot_folder: str | None
    """Gets a folder per snapshot step, named by it; None writes none."""
    snapshot_start: bool
    """Whether it gets a folder `start` too."""
    exact: bool
    """Whether matrix products take the platform's highest precision."""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "TrainingJob":
        """From the JSON form of `dataclasses.asdict`."""
        return cls(
            **{
                **plain,
                "implementation": Implementation(**plain["implementation"]),
                "others": tuple(Implementation(**other) for other in plain["others"]),
                "snapshot_steps": tuple(plain["snapshot_steps"]),
            }
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """One update."""

    step: int
    loss: float | None
    """None where no token was left to train on, or the number was not finite."""
    grad_norm: float | None
    skipped: bool
    """Whether the update left the parameters alone."""
    valid_tokens: int
    """Tokens with a weight in the loss, once per optimiser update on them."""
    update_s: float
    """From groups on the host to new parameters on the devices, without compilation."""
    compile_s: float

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds of the update per valid token; None if there was none."""
        return 1000 * self.update_s / self.valid_tokens if self.valid_tokens else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """One training run."""

    implementation: str
    resolved: str
    """The implementation that its choice means on the platform."""
    platform: str
    device: str
    """Number and kind."""
    versions: dict[str, str]
    steps: tuple[StepResult, ...]
    peak_bytes: int
    """Of the whole process until the end of the last update."""
    peak_of: str
    """What was measured: of the devices where they count, of the process where they do not."""
    accumulate_temp_bytes: int | None
    """The compiler's, for the gradient of the largest micro-batch, per device."""
    accumulate_peak_bytes: int | None
    """As above, with what the program takes and returns."""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RunResult":
        """From the JSON form of `dataclasses.asdict`."""
        return cls(**{**plain, "steps": tuple(StepResult(**step) for step in plain["steps"])})
