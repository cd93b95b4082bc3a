"""What a group buffer reports: the groups that were taken, and counts."""

import dataclasses
from typing import NamedTuple

from services.trajectories.group_report import GroupReport
from services.wire.messages import Group


class WaitingGroup(NamedTuple):
    """A group with its summary and size, which are needed often."""

    group: Group
    report: GroupReport
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """Groups that were taken from the buffer; they are removed from it."""

    groups: tuple[Group, ...]
    """Within the staleness bound, in the order asked for."""
    dropped_stale: tuple[Group, ...]
    """Became too old while they waited: counted, not trained on."""
    policy_version: int
    """Current version when they were taken; minus that of a group, this is its staleness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferCounts:
    """Pushes by outcome, and groups by state."""

    received: int = 0
    """All pushes: the sum of accepted, duplicate, stale, malformed, unknown_receipt, full,
    not_stored and not_open."""
    accepted: int = 0
    duplicate: int = 0
    stale: int = 0
    """Refused when pushed, for their age."""
    malformed: int = 0
    unknown_receipt: int = 0
    full: int = 0
    not_stored: int = 0
    """Valid, but could not be stored."""
    not_open: int = 0
    """Pushed before the learner had a policy: they are pushed again."""
    restored: int = 0
    """Accepted by the process before, and restored from its store."""
    taken: int = 0
    dropped_stale: int = 0
    """Accepted in time, too old when they were to be taken."""
    forgotten: int = 0
    """Accepted, and dropped by `forget` before they were taken."""
    disowned: int = 0
    """Sampled under weights that the learner could not make again after a restart."""
    waiting: int = 0
    waiting_bytes: int = 0
