"""One closed step and the settings of a run, as input for judgements."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from services.process.phases import LEARNER, UNEXPLAINED, WAITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One line of ledger.jsonl with its line of metrics.jsonl."""

    step: int
    time: float
    """Unix seconds at which the step was closed."""
    wall_s: float
    processes: Mapping[str, Mapping[str, float]]
    """Seconds by phase of every process; phases of zero seconds may be absent."""
    metrics: Mapping[str, float]
    """By the names of the metrics log, with NaN and infinity as floats."""
    overlap_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of a process beyond the wall time."""
    absent_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the step in which a process was not running, or that it did not report."""
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of groups that ended in this step, by TrajectoryState value."""
    outstanding: int = 0
    """Groups leased and not ended yet."""
    warnings: tuple[str, ...] = ()

    @property
    def workers(self) -> list[str]:
        """Names of the rollout workers, in the order of the ledger."""
        return [name for name in self.processes if name != LEARNER]

    @property
    def trained(self) -> bool:
        """False for a step that only evaluated, such as the one at the start."""
        return "time/train/update_s" in self.metrics

    def phase_s(self, process: str, *phases: str) -> float:
        """Seconds that a process spent in these phases."""
        row = self.processes.get(process, {})
        return sum(row.get(phase, 0.0) for phase in phases)

    def busy_s(self, process: str) -> float:
        """Seconds in which a process did not wait."""
        row = self.processes.get(process, {})
        return sum(s for phase, s in row.items() if phase not in (*WAITS, UNEXPLAINED))

    def accounted_s(self, process: str) -> float:
        """Sum of the phases and the absence of a process; equals the wall time unless seconds are
        counted twice.
        """
        return sum(self.processes[process].values()) + self.absent_s.get(process, 0.0)

    def metric(self, name: str) -> float:
        """The value, or NaN if the step did not measure it."""
        return self.metrics.get(name, math.nan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings that judgements need."""

    steps: int
    max_staleness: int
    prompts_per_step: int
    completions_per_prompt: int
    max_completion_tokens: int
    slots: int
    """Completions that a worker decodes at once."""
    platform: str
    colocated: bool
    workers_min: int
    workers_max: int
    canary_bound: float | None
    unexplained_fraction: float
    zero_variance: str
    """`keep`, `mask` or `resample`."""
    learns_from_rewards: bool
    """Not where a teacher alone says what is better."""
    has_reference: bool
    advantage: str
    """As algorithm.advantage."""

    @property
    def compares_groups(self) -> bool:
        """Whether a group of equal rewards has no learning signal."""
        return self.advantage not in ("gae", "batch_norm")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RunSettings":
        """From config.yaml as plain values; an absent or invalid value is replaced by the run's
        default.
        """

        def get(dotted: str, default: Any) -> Any:
            here: Any = config
            for part in dotted.split("."):
                if not isinstance(here, Mapping) or here.get(part) is None:
                    return default
                here = here[part]
            return here if _is_like(here, default) else default

        return cls(
            steps=get("run.steps", 0),
            max_staleness=get("rollout.max_staleness", 0),
            prompts_per_step=get("rollout.prompts_per_step", 16),
            completions_per_prompt=get("rollout.completions_per_prompt", 8),
            max_completion_tokens=get("rollout.max_completion_tokens", 1024),
            slots=get("rollout.decode.slots", 64),
            platform=get("placement.platform", "cpu"),
            colocated=get("placement.mode", "separate") == "colocated",
            workers_min=get("rollout.workers.min", 1),
            workers_max=get("rollout.workers.max", 10**6),
            canary_bound=get("weights.canary_bound", None),
            unexplained_fraction=get("log.unexplained_fraction", 0.05),
            zero_variance=get("algorithm.zero_variance", "keep"),
            learns_from_rewards=not get("algorithm.distillation.teacher", "")
            or get("algorithm.distillation.advantage_coef", 0.0) > 0,
            has_reference=get("algorithm.kl_coef", 0.0) > 0,
            advantage=get("algorithm.advantage", "group_norm"),
        )


def _is_like(value: Any, default: Any) -> bool:
    """Whether a value has the type of a default: text, or a number that is not negative, whole if
    the default is; None is the default of a number.
    """
    if isinstance(default, str):
        return isinstance(value, str)
    kinds = int if isinstance(default, int) else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= 10**12
