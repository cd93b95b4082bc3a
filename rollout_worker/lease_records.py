"""What driver and rollout worker tell each other while groups are in the making.

Small records of plain values, carried by Ray calls.
"""

import dataclasses
import enum
from typing import Any

from services.process.process_memory import ProcessMemory
from services.trajectories.group_report import GroupReport
from services.wire.messages import Lease


class WorkerState(enum.Enum):
    """What a worker that answers is doing."""

    READY = "ready"
    """It holds no lease."""
    WORKING = "working"
    DRAINING = "draining"
    """It takes no further lease and finishes those that are being decoded."""
    DRAINED = "drained"
    """It holds no lease and will take none."""


class LeaseOutcome(enum.Enum):
    """How one lease ended at the worker."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The learner had the group already."""
    STALE = "stale"
    """The learner refused the group for its age."""
    RETURNED = "returned"
    """Not begun: the worker is draining."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What the driver wants of a worker; every part may be absent."""

    leases: tuple[Lease, ...] = ()
    cancel: tuple[str, ...] = ()
    """Group ids whose leases are void, whether they have begun or not."""
    drain: bool = False
    """Finish what is being decoded, return the rest, take nothing more."""
    refetch: bool = False
    """Give the version up that is held, since no learner of this run issues it any more."""
    sources: tuple[str, ...] | None = None
    """Addresses that serve weights, preferred first; the learner's is the last."""
    learner_address: str | None = None
    """Where groups are pushed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaseResult:
    """How one lease ended."""

    group_id: str
    attempt: int
    outcome: LeaseOutcome
    report: GroupReport | None
    """None for a lease that was returned."""
    samples: tuple[dict[str, Any], ...] = ()
    """Completions for the log, of a group that was accepted (`sample_record.py`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class News:
    """What happened at a worker since it was last asked."""

    state: WorkerState
    policy_version: int
    """Held on the device; -1 before the first."""
    weight_digest: str
    canary_gap: float
    """On the probe, under this version: largest gap of a logprob, in nats; NaN without a probe."""
    held: int
    """Leases not ended."""
    results: tuple[LeaseResult, ...]
    background_s: dict[str, float]
    """Seconds that threads beside the one of the ledger spent: `fetch`, `push`."""
    transfers: tuple[dict[str, Any], ...]
    """One record for every version that was fetched, as metrics and dashboard show it."""
    memory: ProcessMemory
