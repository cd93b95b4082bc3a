"""The rollout workers of a run: which are there, what each holds, and which are lost.

Nothing here blocks: `poll` looks at every call that is under way, records what ended, and returns.

    starting --> ready <--> working --drain--> draining --> (gone)
       ^           |           |
       |           v           v
       +-- back-off, after a process died, hung or raised
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from driver.config.run_config import PlacementConfig
from driver.errors import RunError
from driver.fleet.actor_calls import (
    GONE,
    ActorFailed,
    Call,
    LearnerLost,
    NoAnswer,
    StandsStill,
    blames_groups,
    died,
    message_of,
    start_failure,
    wait_for_calls,
)
from driver.fleet.dispatch import Dispatch
from driver.fleet.fleet_worker import Worker
from driver.fleet.handles import WorkerHandle
from driver.fleet.launch import Launcher, Room
from driver.fleet.timing_collector import TimingCollector
from rollout_worker.config import RolloutConfig
from rollout_worker.worker_core import RolloutSpec
from rollout_worker.worker_records import LeaseOutcome, LeaseResult, News, Orders, WorkerInfo
from services.control.messages import WorkerState
from services.process.activity import HangWatch
from services.weights.relay_tree import ancestors, relay_tree
from services.wire.messages import Lease

NEWS_S = 5.0
"""How long a worker may keep a question for news open."""
SILENT_S = 60.0
"""Beyond that, how long it may take to answer: a process that is stopped counts as lost then."""
LEAVE_S = 10.0
"""How long a drained process may take to close."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0


class WorkersLost(RunError):
    """Rollout workers failed more often than the run allows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetEvents:
    """What is called when something happens in a fleet."""

    ended: Callable[[LeaseResult], None]
    """A lease that counts has ended."""
    killed: Callable[[Sequence[Lease], str], None]
    """A worker has died, of what the text says, over one of these groups, which it may have begun;
    their leases become void."""
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


class WorkerFleet:
    """Owns the rollout actors."""

    def __init__(
        self,
        placement: PlacementConfig,
        launcher: Launcher,
        make_spec: Callable[[str], RolloutSpec],
        events: FleetEvents,
        timings: TimingCollector,
        *,
        capacity: int,
        relay_fanout: int,
    ):
        """A fleet without workers.

        Args:
            placement: deadlines and restarts.
            make_spec: what a worker of that name needs to start.
            capacity: groups that one worker may hold.
            relay_fanout: workers that pull weights from the same source.
        """
        self._placement = placement
        self._launcher = launcher
        self._make_spec = make_spec
        self._events = events
        self._timings = timings
        self._dispatch = Dispatch(capacity, events.must_be_alone)
        self._relay_fanout = relay_fanout
        self.workers: dict[str, Worker] = {}
        self._next_index = 0
        self._proved = False
        """A worker of this run has started once."""
        self._leaving: list[tuple[WorkerHandle, float]] = []
        """Drained processes, and when those that still are there are killed."""
        self.restarts = 0

    def add(self, room: Room) -> Worker:
        """Starts one more worker; it takes leases once it is ready."""
        name = f"rollout-{self._next_index}"
        self._next_index += 1
        worker = Worker(name=name, room=room)
        self.workers[name] = worker
        self._start(worker)
        return worker

    def drain(self, name: str) -> None:
        """Has a worker finish what it decodes and leave; one that does not work leaves at once."""
        worker = self.workers[name]
        if worker.takes_leases:
            worker.state = WorkerState.DRAINING
            worker.order(Orders(drain=True))
        elif worker.state is not WorkerState.DRAINING:
            self._remove(worker)

    def order_all(self, orders: Orders) -> None:
        """Sends orders to every process that is ready."""
        for _, handle in self.running():
            handle.order(orders)

    def send_sources(self, learner_address: str) -> None:
        """Sends every worker the addresses to ask for weights: its relays, then the learner."""
        ready = {worker.name: worker for worker in self.ready()}
        tree = relay_tree(list(ready), self._relay_fanout)
        for name, worker in ready.items():
            relays = [info.address for r in ancestors(tree, name) if (info := ready[r].info)]
            worker.order(Orders(sources=(*relays, learner_address)))

    def free_capacity(self) -> int:
        """Groups that could be leased to workers now."""
        return self._dispatch.room(self.ready())

    def dispatch_leases(self, leases: Sequence[Lease]) -> None:
        """Gives leases to workers as `Dispatch` decides: some may wait for a later call."""
        given: dict[str, list[Lease]] = {}
        for worker, lease in self._dispatch.assign(self.ready(), leases):
            worker.leases[lease.group_id] = (lease, time.monotonic())
            given.setdefault(worker.name, []).append(lease)
        for name, mine in given.items():
            self.workers[name].state = WorkerState.WORKING
            self.workers[name].order(Orders(leases=tuple(mine)))

    def cancel_all(self) -> None:
        """Voids every lease that is out; the caller has taken them back."""
        self._dispatch.forget_waiting()
        for worker, handle in self.running():
            if worker.leases:
                handle.order(Orders(cancel=tuple(worker.leases)))
                worker.leases.clear()

    def poll(self, timeout_s: float, calls: Collection[Call[object]] = ()) -> set[Call[object]]:
        """Looks once at everything under way.

        Args:
            timeout_s: how long to wait for anything to happen.
            calls: of the caller, which end the wait too.

        Returns:
            those of `calls` that have ended.
        """
        now = time.monotonic()
        for worker in [*self.workers.values()]:
            if worker.handle is None and now >= worker.retry_at:
                self._start(worker)
        mine = {worker.call: worker for worker in self.workers.values() if worker.call is not None}
        if not mine and not calls:
            time.sleep(timeout_s)
        ended = wait_for_calls([*mine, *calls], timeout_s)
        for call, worker in mine.items():
            if call in ended and self.workers.get(worker.name) is worker and worker.call is call:
                self._answered(worker, call)
        while self._leaving and self._leaving[0][1] <= time.monotonic():
            self._leaving.pop(0)[0].kill()
        for worker in [*self.workers.values()]:
            if late := self._overdue(worker):
                self._lost(worker, NoAnswer(late))
            elif hang := worker.hangs.hang(self._placement.step_timeout_s):
                self._lost(worker, StandsStill(f"{worker.name}: {hang}", doing=worker.hangs.doing))
        return ended & set(calls)

    def lost_while(self, worker: Worker, error: BaseException) -> None:
        """Records a worker as lost that failed in a call of the caller's."""
        if self.workers.get(worker.name) is worker and worker.handle is not None:
            self._lost(worker, error)

    def await_process(self, error: LearnerLost) -> None:
        """Records the worker as lost that shared the learner's process; it does not start yet."""
        for worker in self.workers.values():
            if worker.handle is not None:
                self._end_process(worker, error)
                self._hold_back(worker)

    def enter_process(self) -> None:
        """Starts it in the process that the learner has now."""
        for worker in self.workers.values():
            worker.retry_at = 0.0

    def ready(self) -> list[Worker]:
        """Workers that take leases."""
        return [worker for worker in self.workers.values() if worker.takes_leases]

    def running(self) -> list[tuple[Worker, WorkerHandle]]:
        """Workers whose process is ready, those that drain included, with their handles."""
        return [
            (worker, worker.handle)
            for worker in self.workers.values()
            if worker.handle is not None and worker.state is not WorkerState.STARTING
        ]

    def table(self) -> list[dict[str, Any]]:
        """One record of plain values for every worker."""
        now = time.monotonic()
        return [worker.table_row(now) for worker in self.workers.values()]

    def shutdown(self, grace_s: float) -> None:
        """Ends every process; what does not end by itself in time is killed."""
        handles = [worker.handle for worker in self.workers.values() if worker.handle is not None]
        handles += [handle for handle, _ in self._leaving]
        wait_for_calls([handle.close() for handle in handles], grace_s, every=True)
        for handle in handles:
            handle.kill()
        self.workers = {}

    def _start(self, worker: Worker) -> None:
        worker.state = WorkerState.STARTING
        spec = self._make_spec(worker.name)
        worker.handle, worker.call = self._launcher.start_worker(spec, worker.room)
        worker.asked_at = time.monotonic()
        worker.hangs = HangWatch()
        self._timings.table.remove_process(worker.name)

    def _answered(self, worker: Worker, call: Call[WorkerInfo | News]) -> None:
        """Takes what a worker's process reports, and asks it again."""
        try:
            answer = call.result()
        except (*GONE, ActorFailed) as error:
            if worker.state is WorkerState.STARTING:
                failure = start_failure(error, worker.name)
                if not self._proved and not died(error):
                    raise failure from error  # as every other try would end
                self._lost(worker, failure)
            else:
                self._lost(worker, error)
            return
        if isinstance(answer, WorkerInfo):
            self._proved = True
            worker.info = answer
            assert worker.handle is not None
            self._timings.add_process(worker.name, worker.handle, worker.asked_at, answer.clock_s)
            worker.state = WorkerState.READY
            self._events.joined(worker, answer)
        else:
            self._receive(worker, answer)
        if self.workers.get(worker.name) is worker and worker.handle is not None:
            worker.call = worker.handle.news(NEWS_S)
            worker.asked_at = time.monotonic()

    def _receive(self, worker: Worker, news: News) -> None:
        """Records how leases ended and what else a worker reports."""
        worker.receive(news)
        for result in news.results:
            if not worker.end_lease(result):
                continue
            if result.outcome is LeaseOutcome.RETURNED:
                self._events.void([result.group_id], False)
                continue
            worker.done += 1
            worker.failures = 0
            if result.report is not None:
                worker.tokens += result.report.completion_tokens
            self._events.ended(result)
        if worker.state is WorkerState.WORKING and not worker.leases:
            worker.state = WorkerState.READY
        self._events.news(worker, news)
        if worker.state is WorkerState.DRAINING and news.drained:
            self._remove(worker)

    def _overdue(self, worker: Worker) -> str:
        return worker.overdue(
            time.monotonic(),
            startup_timeout_s=self._placement.startup_timeout_s,
            answer_timeout_s=NEWS_S + SILENT_S,
            lease_timeout_s=self._placement.step_timeout_s,
        )

    def _lost(self, worker: Worker, error: BaseException) -> None:
        """Takes the leases of a lost worker away and starts it anew after a pause.

        Raises:
            LearnerLost: where it shares the learner's process, which must be replaced then.
        """
        self._end_process(worker, error)
        if worker.state is WorkerState.DRAINING:
            self._remove(worker)
            return
        if self._launcher.colocated:
            self._hold_back(worker)
            raise LearnerLost(
                f"{worker.name} failed in the learner's process: {worker.last_error}",
                details=getattr(error, "details", "") or str(error),
            ) from error
        self._count_restart(worker, error)
        worker.state = WorkerState.STARTING
        pause_s = min(FIRST_BACKOFF_S * 2 ** min(worker.failures, 10), LONGEST_BACKOFF_S)
        worker.failures += 1
        worker.retry_at = time.monotonic() + pause_s

    def _end_process(self, worker: Worker, error: BaseException) -> None:
        begun = worker.begun_leases() if blames_groups(error) else []
        leases, worker.leases = list(worker.leases), {}
        if worker.handle is not None:
            worker.handle.kill()
        worker.handle, worker.call, worker.memory, worker.policy_version = None, None, None, -1
        worker.hangs = HangWatch()
        worker.last_error = str(error) if isinstance(error, RunError) else message_of(error)
        self._timings.table.remove_process(worker.name)
        if begun:
            self._events.killed(begun, worker.last_error)
        if leases:
            self._events.void(leases, True)

    def _hold_back(self, worker: Worker) -> None:
        self.restarts += 1
        worker.restarts += 1
        worker.state, worker.retry_at = WorkerState.STARTING, math.inf

    def _count_restart(self, worker: Worker, error: BaseException) -> None:
        self.restarts += 1
        worker.restarts += 1
        allowed = self._placement.worker_restarts
        if self.restarts > allowed:
            raise WorkersLost(
                f"{worker.name} failed and placement.worker_restarts={allowed} is used up: "
                f"{worker.last_error}",
                details=getattr(error, "details", "") or str(error),
            ) from error
        self._events.warn(
            f"{worker.name} failed, restart {self.restarts} of {allowed}: {worker.last_error}"
        )

    def _remove(self, worker: Worker) -> None:
        if worker.handle is not None:
            if worker.state is WorkerState.DRAINING:
                self._timings.request(worker.name, worker.handle, time.monotonic())
            worker.handle.close()
            self._leaving.append((worker.handle, time.monotonic() + LEAVE_S))
        self._timings.table.remove_process(worker.name)
        del self.workers[worker.name]
        self._events.left(worker)


def worker_capacity(rollout: RolloutConfig) -> int:
    """Groups that fill the slots of a worker, and some that wait for a slot."""
    filling = -(-rollout.decode.slots // rollout.completions_per_prompt)
    return filling + max(1, filling // 4)
