"""A group without its arrays: what the driver's accounting needs of it."""

import dataclasses

from services.wire.messages import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupReport:
    """One group without its arrays."""

    group_id: str
    attempt: int
    policy_version: int
    """Under which it was sampled."""
    worker: str
    zero_variance: bool
    """At least one completion was scored, and all that were have the same reward."""
    scored: int
    """Completions without a reward_error."""
    reward_sum: float
    """Of their total rewards."""
    reward_error: str
    """Of the first completion that could not be scored; empty where all were."""
    completion_tokens: int
    """That the model sampled."""


def report_of(group: Group) -> GroupReport:
    """Sums a group up."""
    totals = [c.total_reward for c in group.completions if not c.reward_error]
    return GroupReport(
        group_id=group.group_id,
        attempt=group.attempt,
        policy_version=group.policy_version,
        worker=group.worker,
        zero_variance=len(set(totals)) == 1,
        scored=len(totals),
        reward_sum=sum(totals),
        reward_error=next((c.reward_error for c in group.completions if c.reward_error), ""),
        completion_tokens=sum(c.model_tokens for c in group.completions),
    )
