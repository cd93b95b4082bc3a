"""What a group buffer says of its groups: what it gave away, and how many there are."""

import dataclasses
from typing import NamedTuple

from services.trajectories.group_report import GroupReport
from services.wire.messages import Group


class WaitingGroup(NamedTuple):
    """A group with what is asked of it again and again."""

    group: Group
    report: GroupReport
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What `take` gave away: these groups will not be seen again."""

    groups: tuple[Group, ...]
    """Within the staleness bound, in the order asked for."""
    dropped_stale: tuple[Group, ...]
    """Grew too old while they waited: for the books only, not to be trained on."""
    policy_version: int
    """Current version when they were taken; minus that of a group, this is its staleness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferCounts:
    """Pushes by what became of them, and groups by where they are."""

    received: int = 0
    """All pushes: the sum of accepted, duplicate, stale, malformed, unknown_receipt, full,
    not_stored and not_open."""
    accepted: int = 0
    duplicate: int = 0
    stale: int = 0
    """Refused at the door for their age."""
    malformed: int = 0
    unknown_receipt: int = 0
    full: int = 0
    not_stored: int = 0
    """Good, but could not be written down."""
    not_open: int = 0
    """Came before the learner had a policy: they are pushed again."""
    restored: int = 0
    """Accepted by the process before, and taken over from what it had written down."""
    taken: int = 0
    dropped_stale: int = 0
    """Accepted in time, too old when they were to be taken."""
    forgotten: int = 0
    """Accepted, and given up by `forget` before they were taken."""
    disowned: int = 0
    """Sampled under weights that the learner could not make again after a restart."""
    waiting: int = 0
    waiting_bytes: int = 0
