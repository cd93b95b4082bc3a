"""What a fleet keeps of each rollout worker, and whom it tells what happens to one."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from driver.fleet.actors import Room
from rollout_worker.lease_records import LeaseResult, News
from services.process.process_memory import ProcessMemory
from services.wire.messages import Lease


class FleetState(enum.Enum):
    """Where a worker stands, as the driver sees it."""

    STARTING = "starting"
    READY = "ready"
    WORKING = "working"
    DRAINING = "draining"
    WAITING = "waiting"
    """To be started again, after its back-off."""


@dataclasses.dataclass(kw_only=True)
class Worker:
    """One name in the fleet, over all processes that bear it."""

    name: str
    room: Room
    actor: Any
    state: FleetState = FleetState.STARTING
    call: Any = None
    """The question under way: `describe` while it starts, then `news`."""
    asked_at: float = 0.0
    leases: dict[str, tuple[Lease, float]] = dataclasses.field(default_factory=dict)
    """By group id, with the time each was given."""
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What its process says of itself."""
    policy_version: int = -1
    weight_digest: str = ""
    restarts: int = 0
    failures: int = 0
    """Since it last finished a lease."""
    retry_at: float = 0.0
    last_error: str = ""
    done: int = 0
    tokens: int = 0
    memory: ProcessMemory | None = None
    """As last heard."""
    pull_gb_per_s: float = 0.0
    """10^9 bytes a second of the last version that travelled to it."""

    @property
    def takes_leases(self) -> bool:
        return self.state in (FleetState.READY, FleetState.WORKING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetEvents:
    """Who hears what happens in a fleet."""

    ended: Callable[[LeaseResult], None]
    lost: Callable[[Sequence[str], bool], None]
    """Group ids whose leases are void, and whether they expired (else they were returned)."""
    news: Callable[[Worker, News], None]
    joined: Callable[[Worker], None]
    """A process is ready; raises if it must not work."""
    left: Callable[[Worker], None]
    """A drained worker is gone."""
    warn: Callable[[str], None]
