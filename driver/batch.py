"""The groups of one step: leased, delivered, and sorted into those to train on and the others."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from driver.ledger import LeaseBook, TrajectoryState
from rollout_worker.actor import GroupReport, RolloutReport
from services.messages import Lease


@dataclasses.dataclass
class CollectedGroups:
    """What the workers delivered in one step."""

    kept: list[str] = dataclasses.field(default_factory=list)
    """Group ids to train on, in the order of the data."""
    dropped: list[str] = dataclasses.field(default_factory=list)
    """Group ids in the learner's buffer that were replaced."""
    reports: list[GroupReport] = dataclasses.field(default_factory=list)
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, group: GroupReport, book: LeaseBook, *, resample: bool) -> None:
        """Decides whether one delivered group is trained on, and books it if it is not."""
        self.reports.append(group)
        if group.outcome == "duplicate":
            book.end(group.group_id, TrajectoryState.DUPLICATE)
        if group.outcome == "stale":
            book.end(group.group_id, TrajectoryState.DROPPED_STALE)
        elif resample and group.zero_variance:
            book.end(group.group_id, TrajectoryState.DROPPED_ZERO_VARIANCE)
            self.dropped.append(group.group_id)
        else:
            self.kept.append(group.group_id)

    def reward_problem(self) -> str:
        """One line about completions that could not be scored; empty where all were."""
        failed = [report for report in self.reports if report.reward_error]
        if not failed:
            return ""
        return (
            f"completions of {len(failed)} of {len(self.reports)} groups could not be scored and "
            f"are left out, the first for: {failed[0].reward_error}"
        )

    def metrics(self) -> dict[str, float]:
        """Of all groups that were sampled, also those that were replaced."""
        scored = sum(report.scored for report in self.reports)
        total = sum(report.reward_sum for report in self.reports)
        equal = sum(report.zero_variance for report in self.reports)
        return {
            "reward/total/mean": total / scored if scored else math.nan,
            "rollout/zero_variance_fraction": equal / len(self.reports),
            "rollout/resampled_groups": float(len(self.dropped)),
            "rollout/tokens": float(sum(report.completion_tokens for report in self.reports)),
        }


def collect_groups(
    book: LeaseBook,
    rollout: Callable[[Sequence[Lease]], list[RolloutReport]],
    *,
    wanted: int,
    rounds: int,
    resample: bool,
) -> CollectedGroups:
    """Has enough prompts completed, replacing groups that cannot be trained on.

    Args:
        book: where prompts come from and where replaced groups end.
        rollout: turns leases into groups in the learner's buffer.
        wanted: groups to train on.
        rounds: how often more prompts may be leased, the first time included.
        resample: whether a group of equal rewards is replaced.

    Returns:
        `wanted` groups to train on, or fewer when the rounds are used up.
    """
    batch = CollectedGroups()
    for _ in range(rounds):
        for report in rollout(book.lease(wanted - len(batch.kept))):
            batch.samples += report.samples
            for group in report.groups:
                batch.add(group, book, resample=resample)
        if len(batch.kept) == wanted:
            break
    batch.kept.sort()
    batch.dropped.sort()
    return batch
