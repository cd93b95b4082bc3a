"""One rollout worker as the driver sees it, over all processes that bear its name."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from driver.errors import RunError
from driver.fleet.actor_calls import Call
from driver.fleet.handles import WorkerHandle
from driver.fleet.rooms import Room, RoomState
from rollout_worker.worker_records import LeaseResult, News, Orders, WorkerInfo
from services.control.messages import WorkerState, WorkerStatus
from services.process.activity import HangWatch
from services.process.process_memory import ProcessMemory
from services.wire.messages import NO_VERSION, Lease


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldLease:
    """A lease that a worker holds."""

    lease: Lease
    given_at: float
    order_number: int
    """Of the orders that it went out with."""


@dataclasses.dataclass(kw_only=True)
class Worker:
    """What the fleet keeps of a worker."""

    name: str
    room: Room
    handle: WorkerHandle | None = None
    """None while it waits to be started again, after its back-off or for room."""
    state: WorkerState = WorkerState.STARTING
    call: Call[WorkerInfo | News] | None = None
    """Under way: the start of its process, then one question for news after the other."""
    asked_at: float = 0.0
    """When that call was made, on the clock of deadlines."""
    asked_s: float = 0.0
    """The same on the monotonic clock."""
    order_number: int = 0
    """Of the last orders to its process."""
    leases: dict[str, HeldLease] = dataclasses.field(default_factory=dict)
    """By group id."""
    place: RoomState = dataclasses.field(default_factory=RoomState)
    """Where its last process was started."""
    loss: RunError | None = None
    """Why its last process is gone, until it is clear whether its host is too."""
    excused: bool = False
    """Whether it gave up on a learner that was away."""
    suspects: list[Lease] = dataclasses.field(default_factory=list)
    """Leases whose groups may have ended that process, until then; no other worker gets them."""
    look_at: float = 0.0
    """When to look for its host next, while it is silent."""
    waits_for: str = ""
    """Why there is no room for it."""
    info: WorkerInfo | None = None
    """Of its last process that was ready."""
    policy_version: int = -1
    kept_version: int = NO_VERSION
    """Of an evaluation beside training, as it last reported."""
    evaluates: bool = False
    """Whether it was asked to complete held-out prompts and has not answered."""
    restarts: int = 0
    failures: int = 0
    """Since it last finished a lease."""
    retry_at: float = 0.0
    last_error: str = ""
    done: int = 0
    tokens: int = 0
    memory: ProcessMemory | None = None
    """As last reported."""
    cut_since: float | None = None
    """Since when it is cut off from the learner, on the clock of deadlines."""
    hangs: HangWatch = dataclasses.field(default_factory=HangWatch)
    """Of its process."""
    pull_gb_per_s: float = 0.0
    """10^9 bytes a second of the last version that travelled to it."""

    @property
    def takes_leases(self) -> bool:
        """Whether it is ready, reaches the learner and does not drain."""
        return self.is_serving and self.cut_since is None

    @property
    def is_serving(self) -> bool:
        """Whether its process works, cut off from the learner or not."""
        return self.state in (WorkerState.READY, WorkerState.WORKING)

    def order(self, orders: Orders) -> None:
        """Sends orders to its process, numbered."""
        assert self.handle is not None
        self.order_number += 1
        self.handle.order(dataclasses.replace(orders, number=self.order_number))

    def hold_leases(self, leases: Sequence[Lease], now: float) -> None:
        """Sends leases to its process.

        Args:
            now: on the clock of deadlines.
        """
        number = self.order_number + 1
        self.leases |= {
            lease.group_id: HeldLease(lease=lease, given_at=now, order_number=number)
            for lease in leases
        }
        self.order(Orders(leases=tuple(leases)))

    @property
    def held_leases(self) -> list[Lease]:
        """The leases that it holds."""
        return [held.lease for held in self.leases.values()]

    def begun_leases(self) -> list[Lease]:
        """Leases whose groups it may be at: it had the version that they need, as it last reported,
        and completed no evaluation, which runs between groups.
        """
        if self.evaluates or self.policy_version < 0:
            return []
        version = self.policy_version
        return [lease for lease in self.held_leases if lease.min_policy_version <= version]

    def take_leases(self) -> list[str]:
        """Takes every lease off it; their group ids."""
        leases, self.leases = self.leases, {}
        return list(leases)

    def take_handle(self) -> WorkerHandle | None:
        """Forgets its process, which the caller ends."""
        handle, self.handle = self.handle, None
        self.call, self.memory, self.hangs = None, None, HangWatch()
        self.policy_version, self.kept_version = -1, NO_VERSION
        self.cut_since = None
        return handle

    def end_lease(self, result: LeaseResult) -> bool:
        """Takes a lease off that has ended; false for one that was made void meanwhile."""
        held = self.leases.get(result.group_id)
        if held is None or held.lease.attempt != result.attempt:
            return False
        if held.order_number != result.order_number:
            return False
        del self.leases[result.group_id]
        return True

    def receive(self, news: News) -> None:
        """Keeps what its process reports of itself."""
        self.policy_version, self.memory = news.policy_version, news.memory
        self.kept_version = news.kept_version
        self.hangs.note(news.activity, time.monotonic())
        for pull in news.transfers:
            if pull.wire_bytes and pull.seconds:
                self.pull_gb_per_s = pull.wire_bytes / 1e9 / pull.seconds

    def overdue(
        self,
        now: float,
        *,
        startup_timeout_s: float,
        answer_timeout_s: float,
        lease_timeout_s: float,
    ) -> str:
        """What it has not done in time; empty where nothing is due."""
        waited_s = now - self.asked_at
        if self.call is not None:
            if self.state is WorkerState.STARTING and waited_s > startup_timeout_s:
                return f"{self.name} did not start within {startup_timeout_s:g} s"
            if self.state is not WorkerState.STARTING and waited_s > answer_timeout_s:
                return f"{self.name} did not answer within {answer_timeout_s:g} s"
        for group_id, held in self.leases.items():
            if now - held.given_at > lease_timeout_s:
                return f"{self.name} did not finish {group_id} in {lease_timeout_s:g} s"
        return ""

    def status(self, tokens_per_s: float) -> WorkerStatus:
        """What is shown of it to those who ask for the fleet."""
        info = self.info
        return WorkerStatus(
            name=self.name,
            state=self.state,
            policy_version=self.policy_version,
            host=info.host if info else "",
            pid=info.pid if info else 0,
            restarts=self.restarts,
            last_error=self.waits_for or self.last_error,
            groups_leased=len(self.leases),
            groups_done=self.done,
            tokens_per_s=tokens_per_s,
            slots=info.slots if info else 0,
            address=info.address if info else "",
            devices=info.devices if info else "",
            pull_gb_per_s=self.pull_gb_per_s,
            **memory_fields(self.memory),
        )

    def table_row(self, now: float) -> dict[str, Any]:
        """One record of plain values for a post-mortem.

        Args:
            now: on the clock of deadlines.
        """
        return {
            "name": self.name,
            "state": "waiting" if self.handle is None else self.state.value,
            "policy_version": self.policy_version,
            "host": self.info.host if self.info else "",
            "pid": self.info.pid if self.info else 0,
            "address": self.info.address if self.info else "",
            "restarts": self.restarts,
            "last_error": self.last_error,
            "waits_for": self.waits_for,
            "leases": sorted(self.leases),
            "oldest_lease_s": max(
                (now - held.given_at for held in self.leases.values()), default=0.0
            ),
            "done": self.done,
            "tokens": self.tokens,
            "doing": self.hangs.doing,
            "progress": self.hangs.counters,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetEvents:
    """What is called when something happens in a fleet."""

    ended: Callable[[LeaseResult], None]
    """A lease that counts has ended."""
    killed: Callable[[Sequence[Lease], str], bool]
    """A worker has died, of what the text says, over one of these groups, which it may have begun;
    their leases become void. Returns whether it is known to be one's doing, and the last of it."""
    must_be_alone: Callable[[Lease], bool]
    """Whether a worker may hold nothing else beside a lease."""
    void: Callable[[Sequence[str], bool], None]
    """Group ids whose leases are void, and whether they expired (else they were returned)."""
    news: Callable[[Worker, News], None]
    joined: Callable[[Worker, WorkerInfo], None]
    """A process is ready; raises if it must not work."""
    left: Callable[[Worker], None]
    """A drained worker is gone."""
    warn: Callable[[str], None]


def memory_fields(memory: ProcessMemory | None) -> dict[str, int]:
    """Memory as in control.proto: what is unknown is 0 of the host and -1 of devices."""
    if memory is None:
        return {}
    if memory.device_bytes is None or memory.device_peak_bytes is None:
        return {"host_bytes": memory.host_bytes}
    return dataclasses.asdict(memory)
