"""Where a run stands: everything that goes back to a checkpoint when the learner does.

Data cursor and leases, what the learner holds, steps and versions, and what the summary tells.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from driver.accounting.accuracy import Accuracy
from driver.accounting.intake import Intake
from driver.accounting.leases import LeaseTable
from driver.config.run_config import RunConfig
from learner.learner_records import RecordedUpdate, Restored


@dataclasses.dataclass(kw_only=True)
class RunState:
    """The books of one run, at one moment."""

    leases: LeaseTable
    intake: Intake
    step: int = 0
    """Last step whose update was made."""
    policy_version: int = 0
    """The learner's current one."""
    rewards: list[float] = dataclasses.field(default_factory=list)
    """Mean total reward by step."""
    accuracy: dict[int, Accuracy] = dataclasses.field(default_factory=dict)
    """By the step that was evaluated."""
    replay: deque[RecordedUpdate] = dataclasses.field(default_factory=deque)
    """Updates that were recorded after the checkpoint, to be made again."""
    open: dict[str, float] | None = None
    """Metrics of a step that is trained but not yet closed."""

    @classmethod
    def new(cls, config: RunConfig, prompt_count: int) -> "RunState":
        """Of a run that has not taken a step."""
        return cls._of(config, LeaseTable(seed=config.run.seed, prompt_count=prompt_count))

    @classmethod
    def restored(cls, config: RunConfig, prompt_count: int, restored: Restored) -> "RunState":
        """As a checkpoint has them, with what the learner wrote down since.

        Raises:
            ValueError: if seed or data are not those of the checkpoint.
        """
        state = restored.driver_state
        if state is None:
            run = cls.new(config, prompt_count)
        else:
            leases = LeaseTable.restore(
                state["book"], seed=config.run.seed, prompt_count=prompt_count
            )
            run = cls._of(config, leases)
            run.rewards = [math.nan if r is None else r for r in state["rewards"]]
            run.accuracy = {s: Accuracy(correct=c, total=n) for s, c, n in state["accuracy"]}
        run.step, run.policy_version = restored.step, restored.policy_version
        run.replay = deque(restored.replay)
        run.intake.adopt_reports(restored.waiting)
        return run

    def checkpoint_state(self, ledger: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values."""
        return {
            "book": self.leases.state(),
            "ledger": dict(ledger),
            "rewards": [r if math.isfinite(r) else None for r in self.rewards],
            "accuracy": [[step, a.correct, a.total] for step, a in self.accuracy.items()],
        }

    @classmethod
    def _of(cls, config: RunConfig, leases: LeaseTable) -> "RunState":
        algorithm = config.algorithm
        resample = algorithm.zero_variance == "resample"
        intake = Intake(
            leases,
            wanted=config.rollout.prompts_per_step,
            max_staleness=config.rollout.max_staleness,
            resample_rounds=algorithm.resample_rounds if resample else 0,
            samples=config.log.samples_per_step,
        )
        return cls(leases=leases, intake=intake)
