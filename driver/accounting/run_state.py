"""Where a run stands: everything that is rolled back to a checkpoint when the learner is."""

import dataclasses
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from driver.accounting.curriculum import Curriculum
from driver.accounting.evaluations import Evaluations
from driver.accounting.intake import Intake, IntakeRules
from driver.accounting.leases import LeaseTable
from learner.learner_records import RecordedUpdate, Restored
from services.trajectories.data_order import DataOrder


@dataclasses.dataclass(kw_only=True)
class RunState:
    """The state of one run at one moment."""

    leases: LeaseTable
    intake: Intake
    step: int = 0
    """Last step whose update was made."""
    policy_version: int = 0
    """The learner's current one."""
    rewards: list[float] = dataclasses.field(default_factory=list)
    """Mean total reward by step."""
    updates: int = 0
    """Steps that changed the policy."""
    skip_cause: str = ""
    """Why the last step that did not was skipped."""
    evaluations: Evaluations = dataclasses.field(default_factory=Evaluations)
    curriculum: Curriculum | None = None
    replay: deque[RecordedUpdate] = dataclasses.field(default_factory=deque)
    """Updates that were recorded after the checkpoint, to be made again."""
    open: dict[str, float] | None = None
    """Metrics of a step that is trained but not yet closed."""

    @classmethod
    def create(
        cls,
        rules: IntakeRules,
        order: DataOrder,
        *,
        restored: Restored | None = None,
        set_aside: Mapping[int, object] | None = None,
        curriculum: Curriculum | None = None,
    ) -> "RunState":
        """Returns the state of a new run, or of one that goes on from a checkpoint.

        Args:
            order: of the training prompts.
            restored: what the learner found in the checkpoint and recorded since.
            set_aside: positions of prompts that are not leased; may grow later.
            curriculum: a new one, which skips groups.

        Raises:
            ValueError: if seed, data or weights are not those of the checkpoint.
        """
        kept = restored.driver_state if restored else None
        skips = {"set_aside": set_aside, "curriculum": curriculum}
        if kept is None:
            leases = LeaseTable(order, **skips)
        else:
            leases = LeaseTable.restore(kept["book"], order, **skips)
            if curriculum is not None and kept.get("curriculum"):
                curriculum.restore(kept["curriculum"])
        state = cls(leases=leases, intake=Intake(leases, rules), curriculum=curriculum)
        if kept is not None:
            state.rewards = [math.nan if r is None else r for r in kept["rewards"]]
            # A checkpoint of before this count: a step with a reward trained, as far as is known.
            scored = sum(math.isfinite(reward) for reward in state.rewards)
            state.updates = kept.get("updates", scored)
            state.skip_cause = kept.get("skip_cause", "")
            state.evaluations = Evaluations.restore(kept)
        if restored is not None:
            state.step, state.policy_version = restored.step, restored.policy_version
            state.replay = deque(restored.replay)
            state.intake.adopt_reports(restored.waiting)
        return state

    def record_update(self, reward: float, skip_cause: str) -> None:
        """Records the update of one step.

        Args:
            reward: mean total reward; NaN if no completion was scored.
            skip_cause: why the policy stayed as it was; empty where it changed.
        """
        self.rewards.append(reward)
        self.updates += not skip_cause
        self.skip_cause = skip_cause or self.skip_cause

    @property
    def never_scored(self) -> bool:
        """Whether no completion of any step so far had a reward."""
        return not any(map(math.isfinite, self.rewards))

    @property
    def failure(self) -> str:
        """One line on a run whose every update was skipped; empty where one was made."""
        if self.updates or not self.rewards:
            return ""
        return (
            f"nothing was trained: each of {len(self.rewards)} updates was skipped, the last one "
            f"because {self.skip_cause}"
        )

    def checkpoint_state(self, ledger: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values.

        Args:
            ledger: state of the step ledger, which is kept beside this one.
        """
        return {
            "book": self.leases.state(),
            "ledger": dict(ledger),
            "rewards": [r if math.isfinite(r) else None for r in self.rewards],
            "updates": self.updates,
            "skip_cause": self.skip_cause,
            "evaluations": self.evaluations.state(),
            "curriculum": None if self.curriculum is None else self.curriculum.state(),
        }
