"""The rollout workers of a run: which are there, what each holds, and which are lost.

Nothing here blocks: `poll` looks at every call that is under way, records what ended, and returns.

    starting --> ready <--> working --drain--> draining --> (gone)
       ^           |           |
       |           v           v
       +-- back-off, after a process died, hung or raised, and while there is no room

Every method changes what is recorded first and calls others after it, so that an error of theirs
finds the records whole.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from driver.accounting.awake_clock import AwakeClock
from driver.config.sections.placement import PlacementConfig
from driver.errors import RunError
from driver.fleet.actor_calls import (
    ActorFailed,
    ActorLost,
    Call,
    LearnerLost,
    NoAnswer,
    StandsStill,
    blames_groups,
    start_failure,
    wait_for_calls,
)
from driver.fleet.dispatch import Dispatch
from driver.fleet.fleet_worker import FleetEvents, Worker
from driver.fleet.handles import WorkerHandle
from driver.fleet.launch import Launcher
from driver.fleet.replacement import Replacement
from driver.fleet.rooms import LOOK_S, QUIET_S, Room, Rooms, RoomState
from driver.fleet.timing_collector import TimingCollector
from rollout_worker.worker_records import LeaseOutcome, News, Orders, RolloutSpec, WorkerInfo
from services.control.messages import WorkerState
from services.weights.relay_tree import ancestors, host_tree
from services.wire.messages import Lease

NEWS_S = 5.0
"""How long a worker may keep a question for news open."""
SILENT_S = 60.0
"""Beyond that, how long it may take to answer: a process that is stopped counts as lost then."""
CUT_S = 20.0
"""A worker that the learner has not answered for so long is cut off from it."""
AWAY_S = 120.0
"""A worker may have waited for the learner for so long when it gives up."""
CUT_END_S = 600.0
"""Where every worker is, they are replaced after so long."""
LEAVE_S = 10.0
"""How long a drained process may take to close."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0


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
        rooms: Rooms,
        clock: AwakeClock,
        capacity: int,
        relay_fanout: int,
        learner_answers_s: Callable[[], float] = lambda: math.inf,
    ):
        """A fleet without workers.

        Args:
            placement: deadlines and restarts.
            make_spec: what a worker of that name needs to start.
            clock: of deadlines.
            capacity: groups that one worker may hold.
            relay_fanout: workers that pull weights from the same source.
            learner_answers_s: for how long the learner has answered the driver; 0 while it is away.
        """
        self._placement = placement
        self._launcher = launcher
        self._make_spec = make_spec
        self._events = events
        self._timings = timings
        self._rooms = rooms
        self._clock = clock
        self._dispatch = Dispatch(capacity, events.must_be_alone)
        self._relay_fanout = relay_fanout
        self._learner_answers_s = learner_answers_s
        self.workers: dict[str, Worker] = {}
        self._next_index = 0
        self._proved = False
        """A worker of this run has started once."""
        self._leaving: list[tuple[WorkerHandle, float]] = []
        """Drained processes, and when those that still are there are killed."""
        self._starts = True
        self.replacement = Replacement(placement, rooms, clock, events, self.workers)

    def add(self, room: Room) -> Worker:
        """Starts one more worker; it takes leases once it is ready."""
        worker = Worker(name=f"rollout-{self._next_index}", room=room)
        self._next_index += 1
        self.workers[worker.name] = worker
        self._start_where_possible(worker)
        return worker

    def stop_starting(self) -> None:
        """From now on no process is started, and a worker that is lost stays lost."""
        self._starts = False
        for worker in self.workers.values():
            self.replacement.release_suspects(worker, guilty=False)

    def drain(self, name: str) -> None:
        """Has a worker finish what it decodes and leave; one that does not work leaves at once."""
        worker = self.workers[name]
        if worker.is_serving:
            worker.state = WorkerState.DRAINING
            worker.order(Orders(drain=True))
        elif worker.state is not WorkerState.DRAINING:
            self._remove(worker)

    def order_all(self, orders: Orders) -> None:
        """Sends orders to every process that is ready."""
        for worker, _ in self.running():
            worker.order(orders)

    def send_sources(self, learner_address: str) -> None:
        """Sends every worker the addresses to ask for weights: its relays, then the learner."""
        ready = {name: worker for name, worker in self.workers.items() if worker.is_serving}
        addresses = {name: one.info.address for name, one in ready.items() if one.info}
        hosts = {name: address.rpartition(":")[0] for name, address in addresses.items()}
        tree = host_tree(hosts, self._relay_fanout)
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
            given.setdefault(worker.name, []).append(lease)
        for name, mine in given.items():
            self.workers[name].state = WorkerState.WORKING
            self.workers[name].hold_leases(mine, self._clock.now())

    def cancel_all(self) -> None:
        """Voids every lease that is out; the caller has taken them back."""
        self._dispatch.forget_waiting()
        for worker in self.workers.values():
            worker.suspects = []
        for worker, _ in self.running():
            if group_ids := worker.take_leases():
                worker.order(Orders(cancel=tuple(group_ids)))

    def poll(self, timeout_s: float, calls: Collection[Call[object]] = ()) -> set[Call[object]]:
        """Looks once at everything under way.

        Args:
            timeout_s: how long to wait for anything to happen.
            calls: of the caller, which end the wait too.

        Returns:
            those of `calls` that have ended.

        Raises:
            WorkersLost: if workers were lost too often.
            NoRoomLeft: if none is left, and no room for any.
        """
        self._start_again()
        mine = {worker.call: worker for worker in self.workers.values() if worker.call is not None}
        if not mine and not calls:
            time.sleep(timeout_s)
        ended = wait_for_calls([*mine, *calls], timeout_s)
        for call, worker in mine.items():
            if call in ended and self.workers.get(worker.name) is worker and worker.call is call:
                self._answered(worker, call)
        while self._leaving and self._leaving[0][1] <= self._clock.now():
            self._leaving.pop(0)[0].kill()
        for worker in [*self.workers.values()]:
            if late := self._overdue(worker):
                self._lost(worker, NoAnswer(late))
            elif hang := worker.hangs.hang(self._placement.step_timeout_s):
                self._lost(worker, StandsStill(f"{worker.name}: {hang}", doing=worker.hangs.doing))
            elif self._host_is_gone(worker):
                silence = f"{worker.name} and its host {worker.place.host} do not answer"
                self._lost(worker, NoAnswer(silence))
        return ended & set(calls)

    def lost_while(self, worker: Worker, handle: WorkerHandle, error: RunError) -> None:
        """Records a worker as lost whose process failed in a call of the caller's.

        Args:
            handle: of the process that was called; the worker may have another one now.
        """
        if self.workers.get(worker.name) is worker and worker.handle is handle:
            self._lost(worker, error)

    def await_process(self, error: LearnerLost) -> None:
        """Records the worker as lost that shared the learner's process; it does not start yet."""
        for worker in self.workers.values():
            if worker.handle is not None:
                self._end_process(worker, error, retry_at=math.inf)

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
        now = self._clock.now()
        return [worker.table_row(now) for worker in self.workers.values()]

    def shutdown(self, grace_s: float) -> None:
        """Ends every process; what does not end by itself in time is killed."""
        handles = [worker.handle for worker in self.workers.values() if worker.handle is not None]
        handles += [handle for handle, _ in self._leaving]
        self.workers.clear()
        self._leaving = []
        wait_for_calls([handle.close() for handle in handles], grace_s, every=True)
        for handle in handles:
            handle.kill()

    def _start_again(self) -> None:
        """Starts the processes that are due, where there is room."""
        for worker in [*self.workers.values()]:
            if worker.handle is None and self._clock.now() >= worker.retry_at:
                self._start_where_possible(worker)
        if self._starts:
            self.replacement.check_room()

    def _start_where_possible(self, worker: Worker) -> None:
        if self._starts and (place := self.replacement.place_for(worker)) is not None:
            self._start(worker, place)

    def _start(self, worker: Worker, state: RoomState) -> None:
        """Starts a process for a worker."""
        waited, worker.waits_for = worker.waits_for, ""
        worker.state, worker.place, worker.order_number = WorkerState.STARTING, state, 0
        worker.asked_at, worker.asked_s = self._clock.now(), time.monotonic()
        self._timings.table.remove_process(worker.name)
        spec = self._make_spec(worker.name)
        try:
            worker.handle, worker.call = self._launcher.start_worker(spec, worker.room)
        except ActorLost as error:
            self._lost(worker, error)
            return
        if waited:
            self._events.warn(f"{worker.name} has room on {state.host} and starts")

    def _answered(self, worker: Worker, call: Call[WorkerInfo | News]) -> None:
        """Takes what a worker's process reports, and asks it again."""
        try:
            answer = call.result()
        except (ActorLost, ActorFailed) as error:
            if worker.state is not WorkerState.STARTING:
                self._lost(worker, error)
                return
            failure = start_failure(error, worker.name)
            alike = isinstance(error, ActorFailed) or error.by_constructor
            if alike and not self._proved:
                raise failure from error  # as every other try would end
            self._lost(worker, failure)
            return
        assert worker.handle is not None
        asked_s = worker.asked_s
        worker.call = worker.handle.news(NEWS_S)
        worker.asked_at, worker.asked_s = self._clock.now(), time.monotonic()
        if isinstance(answer, News):
            self._receive(worker, answer)
            return
        self._proved = True
        worker.info, worker.state = answer, WorkerState.READY
        self._timings.add_process(worker.name, worker.handle, asked_s, answer.clock_s)
        self._events.joined(worker, answer)

    def _receive(self, worker: Worker, news: News) -> None:
        """Records how leases ended and what else a worker reports."""
        worker.receive(news)
        self._judge_reach(worker, news.learner_silent_s)
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
        # A lease that is still on its way to a worker that has drained comes back with later news.
        if worker.state is WorkerState.DRAINING and news.drained and not worker.leases:
            self._remove(worker)

    def _judge_reach(self, worker: Worker, silent_s: float) -> None:
        """Takes the leases of a worker that the learner does not answer, while it answers us."""
        if worker.cut_since is not None and not silent_s:
            worker.cut_since = None
            self._events.warn(f"{worker.name} reaches the learner again, and takes leases")
        if worker.cut_since is not None or min(silent_s, self._learner_answers_s()) < CUT_S:
            return
        worker.cut_since = self._clock.now()
        group_ids = worker.take_leases()
        host = worker.info.host if worker.info else "its host"
        worker.last_error = (
            f"no answer from the learner for {silent_s:.0f} s, while both answer the driver: look "
            f"for what cuts {host} off from the learner's host"
        )
        if group_ids:
            self._events.void(group_ids, True)
        self._events.warn(
            f"{worker.name}: {worker.last_error}; its {len(group_ids)} leases go to others"
        )
        if group_ids:
            worker.order(Orders(cancel=tuple(group_ids)))

    def _overdue(self, worker: Worker) -> str:
        now = self._clock.now()
        if worker.cut_since is not None and not self.ready() and now - worker.cut_since > CUT_END_S:
            return f"{worker.name} has not reached the learner for {CUT_END_S:g} s, nor do others"
        return worker.overdue(
            now,
            startup_timeout_s=self._placement.startup_timeout_s,
            answer_timeout_s=NEWS_S + SILENT_S,
            lease_timeout_s=self._placement.step_timeout_s,
        )

    def _host_is_gone(self, worker: Worker) -> bool:
        """Whether a silent worker need not be waited for, since its host is silent too."""
        now = self._clock.now()
        quiet = worker.call is not None and now - worker.asked_at > NEWS_S + QUIET_S
        if self._launcher.colocated or not quiet or now < worker.look_at:
            return False
        worker.look_at = now + LOOK_S
        return not self._rooms.state(worker.room).is_same_life(worker.place)

    def _lost(self, worker: Worker, error: RunError) -> None:
        """Takes the leases of a lost worker away; it starts anew after a pause.

        Raises:
            LearnerLost: where it shares the learner's process, which must be replaced then.
        """
        if worker.state is WorkerState.DRAINING:
            self._remove(worker)
            return
        if self._launcher.colocated:
            self._end_process(worker, error, retry_at=math.inf)
            raise LearnerLost(
                f"{worker.name} failed in the learner's process: {worker.last_error}",
                details=error.details or str(error),
            ) from error
        pause_s = min(FIRST_BACKOFF_S * 2 ** min(worker.failures, 10), LONGEST_BACKOFF_S)
        worker.failures += 1
        # One that gave up on a learner which was away did not fail.
        gave_up = isinstance(error, ActorFailed) and not blames_groups(error)
        worker.loss, worker.excused = error, gave_up and self._learner_answers_s() < AWAY_S
        self._end_process(worker, error, retry_at=self._clock.now() + pause_s)

    def _end_process(self, worker: Worker, error: RunError, *, retry_at: float) -> None:
        begun = worker.begun_leases() if blames_groups(error) else []
        handle, group_ids = worker.take_handle(), worker.take_leases()
        worker.state, worker.retry_at = WorkerState.STARTING, retry_at
        worker.last_error = str(error)
        if self._launcher.colocated:
            self.replacement.count(worker)
        self._timings.table.remove_process(worker.name)
        worker.suspects = begun
        kept = {lease.group_id for lease in begun}
        if void := [group_id for group_id in group_ids if group_id not in kept]:
            self._events.void(void, True)
        if self._launcher.colocated:
            self.replacement.release_suspects(worker, guilty=True)
        if handle is not None:
            handle.kill()

    def _remove(self, worker: Worker) -> None:
        """Forgets a worker that has drained, or that was lost before it had."""
        del self.workers[worker.name]
        drained = worker.state is WorkerState.DRAINING
        handle, group_ids = worker.take_handle(), worker.take_leases()
        if handle is not None:
            self._leaving.append((handle, self._clock.now() + LEAVE_S))
        self._timings.table.remove_process(worker.name)
        if group_ids:
            self._events.void(group_ids, True)
        self.replacement.release_suspects(worker, guilty=False)
        self._events.left(worker)
        if handle is not None:
            if drained:
                self._timings.request(worker.name, handle, time.monotonic())
            handle.close()
