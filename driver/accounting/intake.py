"""Which groups train in a step, and how many prompts may be under way for that.

Pure decisions over reports: which groups the learner has, which are with workers, which are too
old.
Synchronous mode is `max_staleness` 0 and needs no rule of its own.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from driver.accounting.leases import LeaseTable, TrajectoryState
from learner.config import AlgorithmConfig
from rollout_worker.config.rollout_config import RolloutConfig
from rollout_worker.sample_record import Sample
from rollout_worker.worker_records import LeaseOutcome, LeaseResult
from services.trajectories.group_report import GroupReport
from services.wire.messages import Lease

_LEFT_OUT = {
    TrajectoryState.DROPPED_ZERO_VARIANCE.value: "of equal rewards",
    TrajectoryState.DROPPED_ERROR.value: "without a scored completion",
    TrajectoryState.DROPPED_STALE.value: "too old or outside the off-policy bounds",
}
"""Ledger state of a group that did not train -> in words."""


@dataclasses.dataclass(kw_only=True)
class StepBatch:
    """The groups of one step."""

    kept: list[str]
    """Group ids to train on, in the order of the data."""
    dropped: list[str] = dataclasses.field(default_factory=list)
    """Group ids in the learner's buffer that will never be trained on."""
    reports: list[GroupReport] = dataclasses.field(default_factory=list)
    """Of the groups above, kept and dropped."""
    arrived_tokens: int = 0
    """Sampled tokens of the groups that arrived since the last step: those above or, where steps
    and rollout overlap, others."""
    samples: list[Sample] = dataclasses.field(default_factory=list)
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of the source by group id, where there are several sources."""

    def reward_problem(self) -> str:
        """One line about completions that could not be scored; empty where all were."""
        failed = [report for report in self.reports if report.reward_error]
        if not failed:
            return ""
        return (
            f"completions of {len(failed)} of {len(self.reports)} groups could not be scored and "
            f"are left out, the first for: {failed[0].reward_error}"
        )

    def skip_cause(self, metrics: Mapping[str, float], outcomes: Mapping[str, str]) -> str:
        """One line on why the update of this step was skipped; empty where it was made.

        Args:
            metrics: of the update.
            outcomes: ledger state by group_id, of the groups that the update got.
        """
        if not metrics["train/update_skipped"]:
            return ""
        if "train/loss" in metrics:
            return "its loss or gradient was not finite; its groups are in rejected/"
        if not self.reports:
            return "no group came that could train"
        errors = [report.reward_error for report in self.reports if report.reward_error]
        if errors and not any(report.scored for report in self.reports):
            return f"no completion could be scored, the first for: {errors[0]}"
        ends = collections.Counter(
            _LEFT_OUT.get(
                outcomes.get(report.group_id, self._dropped_as(report)), "with no completion left"
            )
            for report in self.reports
        )
        shown = ", ".join(f"{count} {why}" for why, count in sorted(ends.items()))
        return f"nothing was left to train on, groups: {shown}"

    def _dropped_as(self, report: GroupReport) -> str:
        """Ledger state of a group that never came to an update."""
        equal = report.zero_variance and report.group_id in self.dropped
        state = TrajectoryState.DROPPED_ZERO_VARIANCE if equal else TrajectoryState.DROPPED_STALE
        return state.value

    def metrics(self) -> dict[str, float]:
        """Of the step's groups, also those that were replaced."""
        scored = sum(report.scored for report in self.reports)
        total = sum(report.reward_sum for report in self.reports)
        equal = sum(report.zero_variance for report in self.reports)
        return {
            "reward/total/mean": total / scored if scored else math.nan,
            "rollout/zero_variance_fraction": equal / max(1, len(self.reports)),
            "rollout/resampled_groups": float(len(self.dropped)),
            "rollout/tokens": float(self.arrived_tokens),
            **self._by_source(),
        }

    def _by_source(self) -> dict[str, float]:
        """Groups and mean reward of each source, where there are several."""
        reports: dict[str, list[GroupReport]] = {}
        for report in self.reports:
            if report.group_id in self.sources:
                reports.setdefault(self.sources[report.group_id], []).append(report)
        found = {}
        for name, those in sorted(reports.items()):
            found[f"rollout/by_source/{name}"] = float(len(those))
            if scored := sum(report.scored for report in those):
                reward = sum(report.reward_sum for report in those) / scored
                found[f"reward/by_source/{name}"] = reward
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntakeRules:
    """How many groups a step takes, and which."""

    wanted: int
    """Groups of a step."""
    max_staleness: int
    resample_rounds: int = 0
    """How many further steps' worth of prompts a step may lease to replace groups of equal rewards;
    0 keeps them."""
    samples: int = 0
    """Completions of a step that the log keeps. The same number of a step's leases, or a few more,
    ask for one."""

    @classmethod
    def of(cls, rollout: RolloutConfig, algorithm: AlgorithmConfig, samples: int) -> "IntakeRules":
        """The rules that a configuration sets."""
        resample = algorithm.zero_variance == "resample"
        return cls(
            wanted=rollout.prompts_per_step,
            max_staleness=rollout.max_staleness,
            resample_rounds=algorithm.resample_rounds if resample else 0,
            samples=samples,
        )


class Intake:
    """Groups in the learner's buffer that it was not yet asked to train on."""

    def __init__(self, leases: LeaseTable, rules: IntakeRules):
        self._leases = leases
        self._wanted = rules.wanted
        self._max_staleness = rules.max_staleness
        self._rounds = rules.resample_rounds
        self._logged_every = max(1, rules.wanted // rules.samples) if rules.samples else 0
        self._leased = 0
        self._waiting: dict[str, GroupReport] = {}
        self._arrived_tokens = 0
        self._samples: list[Sample] = []
        self._dropped: dict[str, GroupReport] = {}
        self._granted = 0
        """Leases since the last step was taken."""
        self.unconfirmed: set[str] = set()
        """Groups that a worker reports as delivered before; only the learner has their reports."""

    @property
    def waiting(self) -> int:
        """Groups that may train."""
        return len(self._waiting)

    def grant_leases(self, count: int, policy_version: int, steps_left: int) -> list[Lease]:
        """Leases up to `count` groups, and no more than may be under way.

        Each names the oldest version that it can be sampled under and still train in its turn.

        Args:
            policy_version: the learner's current one.
            steps_left: that are not trained, the one in progress included.
        """
        self._expire(policy_version)
        leases = []
        for _ in range(min(count, self._allowance(steps_left))):
            turn = policy_version + self._leases.outstanding // self._wanted
            (lease,) = self._leases.grant_leases(1, max(0, turn - self._max_staleness))
            logged = bool(self._logged_every) and self._leased % self._logged_every == 0
            leases.append(dataclasses.replace(lease, logged=logged))
            self._granted += 1
            self._leased += 1
        self._leases.write_decisions()
        return leases

    def record_result(self, result: LeaseResult) -> None:
        """Records how one lease ended, unless it was returned."""
        if result.outcome is LeaseOutcome.STALE:
            self._leases.end_group(result.group_id, TrajectoryState.DROPPED_STALE)
        elif result.outcome is LeaseOutcome.DUPLICATE:
            self._leases.end_group(result.group_id, TrajectoryState.DUPLICATE)
            if self._leases.mark_held(result.group_id):
                self.unconfirmed.add(result.group_id)
        else:
            assert result.outcome is LeaseOutcome.ACCEPTED and result.report is not None
            if self._leases.mark_held(result.group_id):
                self._admit(result.report)
                self._samples += result.samples

    def adopt_reports(self, reports: Iterable[GroupReport]) -> None:
        """Adds groups that the learner reports to have."""
        for report in reports:
            self.unconfirmed.discard(report.group_id)
            self._leases.adopt_groups([report.group_id])
            self._admit(report)

    def is_ready(self, policy_version: int, steps_left: int) -> bool:
        """Whether a step can be taken: there are enough groups, or no more can come."""
        if self.unconfirmed:
            return False
        if len(self._admissible(policy_version)) >= self._wanted:
            return True
        return self._leases.out == 0 and self._allowance(steps_left) == 0

    def take_batch(self, policy_version: int) -> StepBatch:
        """Removes and returns the oldest groups that may train."""
        self._expire(policy_version)
        kept = sorted(self._admissible(policy_version)[: self._wanted])
        taken = {group_id: self._waiting.pop(group_id) for group_id in kept} | self._dropped
        batch = StepBatch(
            kept=kept,
            dropped=sorted(self._dropped),
            reports=[taken[group_id] for group_id in sorted(taken)],
            arrived_tokens=self._arrived_tokens,
            samples=self._samples,
            sources=self._leases.names_of(taken),
        )
        self._dropped, self._arrived_tokens, self._samples, self._granted = {}, 0, [], 0
        return batch

    def repeat_batch(
        self, kept: Sequence[str], dropped: Sequence[str], reports: Sequence[GroupReport]
    ) -> StepBatch:
        """The batch of a recorded step that is trained again.

        Args:
            reports: of these groups, as the learner gives them.
        """
        self._leases.adopt_groups([*kept, *dropped])
        for group_id in filter(self._leases.is_held, dropped):  # others ended before the checkpoint
            self._leases.end_group(group_id, TrajectoryState.DROPPED_ZERO_VARIANCE)
        return StepBatch(
            kept=list(kept),
            dropped=list(dropped),
            reports=list(reports),
            sources=self._leases.names_of(report.group_id for report in reports),
            arrived_tokens=sum(report.completion_tokens for report in reports),
        )

    def discard_groups(self, group_ids: Iterable[str]) -> None:
        """Removes groups that the learner has dropped; the caller records how they end."""
        for group_id in group_ids:
            self._waiting.pop(group_id, None)

    def _expire(self, policy_version: int) -> None:
        """Ends the groups that became too old while they waited."""
        fresh = set(self._admissible(policy_version))
        for group_id in [group_id for group_id in self._waiting if group_id not in fresh]:
            self._leases.end_group(group_id, TrajectoryState.DROPPED_STALE)
            self._dropped[group_id] = self._waiting.pop(group_id)

    def _admit(self, report: GroupReport) -> None:
        self._arrived_tokens += report.completion_tokens
        if self._rounds and report.zero_variance:
            self._leases.end_group(report.group_id, TrajectoryState.DROPPED_ZERO_VARIANCE)
            self._dropped[report.group_id] = report
        else:
            self._waiting[report.group_id] = report

    def _admissible(self, policy_version: int) -> list[str]:
        """Ids of groups within the bound, those of the oldest version first."""
        fresh = [
            (report.policy_version, group_id)
            for group_id, report in self._waiting.items()
            if policy_version - report.policy_version <= self._max_staleness
        ]
        return [group_id for _, group_id in sorted(fresh)]

    def _allowance(self, steps_left: int) -> int:
        under_way = min(self._max_staleness + 1, steps_left) * self._wanted
        allowed = under_way - self._leases.outstanding
        if self._rounds:
            allowed = min(allowed, (self._rounds + 1) * self._wanted - self._granted)
        return max(0, allowed)
