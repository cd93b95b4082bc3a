"""The rollout workers of a run: who is there, what each holds, and who is lost.

Nothing here blocks: `pump` looks at every call that is under way, books what ended, and returns.

    starting --describe--> ready/working --drain--> draining --> (gone)
       ^                        |
       |     back-off           v
       +------------------- waiting     a process that died, hung or raised
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

from driver.config.run_config import RunConfig
from driver.errors import RunError
from driver.fleet import actors
from driver.fleet.actors import GONE, ActorFailed, LearnerLost, NoAnswer, Room
from driver.fleet.fleet_records import FleetEvents, FleetState, Worker
from driver.fleet.launch import Launcher
from driver.fleet.timing_collector import TimingCollector
from rollout_worker.actor import RolloutSpec
from rollout_worker.lease_records import LeaseOutcome, News, Orders, WorkerState
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


class Fleet:
    """Owns the rollout actors."""

    def __init__(
        self,
        config: RunConfig,
        launcher: Launcher,
        make_spec: Callable[[str], RolloutSpec],
        events: FleetEvents,
        timings: TimingCollector,
    ):
        self._config = config
        self._launcher = launcher
        self._make_spec = make_spec
        self._events = events
        self._timings = timings
        self.workers: dict[str, Worker] = {}
        self._next_index = 0
        self._proved = False
        """A worker of this run has started once."""
        self._leaving: list[tuple[Any, float]] = []
        """Drained processes, and when those that still are there are killed."""
        self.restarts = 0
        self.capacity = _capacity(config)
        """Groups that one worker may hold."""

    def add(self, room: Room) -> Worker:
        """Starts one more worker; it takes leases once it is ready."""
        name = f"rollout-{self._next_index}"
        self._next_index += 1
        worker = Worker(name=name, room=room, actor=None)
        self.workers[name] = worker
        self._start(worker)
        return worker

    def drain(self, name: str) -> None:
        """Has a worker finish what it decodes and leave; one that does not work leaves at once."""
        worker = self.workers[name]
        if worker.takes_leases:
            worker.state = FleetState.DRAINING
            self.order(worker, Orders(drain=True))
        elif worker.state is not FleetState.DRAINING:
            self._remove(worker)

    def order(self, worker: Worker, orders: Orders) -> None:
        """Sends orders; a process that is gone shows at its next news."""
        worker.actor.order.remote(orders)

    def order_all(self, orders: Orders) -> None:
        """Sends orders to every process that is ready."""
        for worker in self.running():
            self.order(worker, orders)

    def tell_sources(self, learner_address: str) -> None:
        """Says to every worker whom to ask for weights: its relays, then the learner."""
        ready = {worker.name: worker for worker in self.ready()}
        tree = relay_tree(list(ready), self._config.weights.relay_fanout)
        for name, worker in ready.items():
            relays = [ready[relay].about["address"] for relay in ancestors(tree, name)]
            self.order(worker, Orders(sources=(*relays, learner_address)))

    def room(self) -> int:
        """Groups that could be given out now."""
        return sum(self.capacity - len(w.leases) for w in self.workers.values() if w.takes_leases)

    def grant(self, leases: Sequence[Lease]) -> None:
        """Gives leases to whoever holds the fewest; there must be room for all of them."""
        given: dict[str, list[Lease]] = {}
        for lease in leases:
            free = [worker for worker in self.workers.values() if worker.takes_leases]
            worker = min(free, key=lambda worker: len(worker.leases))
            worker.leases[lease.group_id] = (lease, time.monotonic())
            given.setdefault(worker.name, []).append(lease)
        for name, mine in given.items():
            self.workers[name].state = FleetState.WORKING
            self.order(self.workers[name], Orders(leases=tuple(mine)))

    def cancel_all(self) -> None:
        """Voids every lease that is out; the caller has given them back."""
        for worker in self.running():
            if worker.leases:
                self.order(worker, Orders(cancel=tuple(worker.leases)))
                worker.leases.clear()

    def pump(self, timeout_s: float, calls: Iterable[Any] = ()) -> set[Any]:
        """One look at everything under way.

        Args:
            timeout_s: how long to wait for anything to happen.
            calls: of the caller, which end the wait too.

        Returns:
            those of `calls` that have ended.
        """
        now = time.monotonic()
        for worker in [*self.workers.values()]:
            if worker.state is FleetState.WAITING and now >= worker.retry_at:
                self._start(worker)
        mine = {worker.call: worker for worker in self.workers.values() if worker.call is not None}
        calls = list(calls)
        waited = [*mine, *calls]
        if not waited:
            time.sleep(timeout_s)
            return set()
        ended = set(ray.wait(waited, num_returns=1, timeout=timeout_s)[0])
        if ended:  # whatever else has ended needs no further turn
            ended |= set(ray.wait(waited, num_returns=len(waited), timeout=0)[0])
        for call in ended & mine.keys():
            worker = mine[call]
            if self.workers.get(worker.name) is worker and worker.call is call:
                self._answered(worker, call)
        while self._leaving and self._leaving[0][1] <= time.monotonic():
            actors.kill(self._leaving.pop(0)[0])
        for worker in [*self.workers.values()]:
            if late := self._late(worker):
                self._lost(worker, NoAnswer(late))
        return ended & set(calls)

    def lost_while(self, worker: Worker, error: BaseException) -> None:
        """Books a worker as lost that failed in a call of the caller's."""
        if self.workers.get(worker.name) is worker and worker.state is not FleetState.WAITING:
            self._lost(worker, error)

    def await_process(self, error: LearnerLost) -> None:
        """Books the worker as gone that shared the learner's process; nothing starts it for now."""
        for worker in self.workers.values():
            if worker.state is not FleetState.WAITING:
                self._gone(worker, error)
                self._hold_back(worker)

    def enter_process(self) -> None:
        """Has it start in the process that the learner has now."""
        for worker in self.workers.values():
            worker.retry_at = 0.0

    def ready(self) -> list[Worker]:
        """Workers that can be called."""
        return [worker for worker in self.workers.values() if worker.takes_leases]

    def running(self) -> list[Worker]:
        """Workers whose process is ready, those that leave included."""
        states = (FleetState.READY, FleetState.WORKING, FleetState.DRAINING)
        return [worker for worker in self.workers.values() if worker.state in states]

    def table(self) -> list[dict[str, Any]]:
        """One record of plain values for every worker."""
        now = time.monotonic()
        return [
            {
                "name": worker.name,
                "state": worker.state.value,
                "policy_version": worker.policy_version,
                "host": worker.about.get("host", ""),
                "pid": worker.about.get("pid", 0),
                "address": worker.about.get("address", ""),
                "restarts": worker.restarts,
                "last_error": worker.last_error,
                "leases": sorted(worker.leases),
                "oldest_lease_s": max((now - at for _, at in worker.leases.values()), default=0.0),
                "done": worker.done,
                "tokens": worker.tokens,
            }
            for worker in self.workers.values()
        ]

    def shutdown(self, grace_s: float) -> None:
        """Ends every process; what does not end by itself in time is killed."""
        handles = [worker.actor for worker in self.workers.values() if worker.actor is not None]
        handles += [actor for actor, _ in self._leaving]
        closing = [actor.close.remote() for actor in handles]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=grace_s)
        for actor in handles:
            actors.kill(actor)
        self.workers = {}

    def _start(self, worker: Worker) -> None:
        worker.state = FleetState.STARTING
        spec = self._make_spec(worker.name)
        worker.actor, worker.call = self._launcher.worker(spec, worker.room)
        worker.asked_at = time.monotonic()
        self._timings.table.remove_process(worker.name)

    def _ask(self, worker: Worker) -> None:
        worker.call = worker.actor.news.remote(NEWS_S)
        worker.asked_at = time.monotonic()

    def _answered(self, worker: Worker, call: Any) -> None:
        starting = worker.state is FleetState.STARTING
        try:
            answer = actors.result_of(call, worker.name, "start" if starting else "its loop")
        except (*GONE, ActorFailed) as error:
            if starting:
                failure = actors.start_failure(error, worker.name)
                if not self._proved and not actors.died(error):
                    raise failure from error  # as every other try would end
                self._lost(worker, failure)
            else:
                self._lost(worker, error)
            return
        if starting:
            self._proved = True
            worker.about = answer
            self._timings.table.add_process(worker.name, worker.asked_at, answer)
            worker.state = FleetState.READY
            self._events.joined(worker)
        else:
            self._hear(worker, answer)
        if self.workers.get(worker.name) is worker:
            self._ask(worker)

    def _hear(self, worker: Worker, news: News) -> None:
        worker.policy_version, worker.weight_digest = news.policy_version, news.weight_digest
        worker.memory = news.memory
        for travelled in [one for one in news.transfers if one["wire_bytes"] and one["seconds"]]:
            worker.pull_gb_per_s = travelled["wire_bytes"] / 1e9 / travelled["seconds"]
        for result in news.results:
            given = worker.leases.get(result.group_id)
            if given is None or given[0].attempt != result.attempt:
                continue  # voided meanwhile
            del worker.leases[result.group_id]
            if result.outcome is LeaseOutcome.RETURNED:
                self._events.lost([result.group_id], False)
                continue
            worker.done += 1
            worker.failures = 0
            if result.report is not None:
                worker.tokens += result.report.completion_tokens
            self._events.ended(result)
        if worker.state is FleetState.WORKING and not worker.leases:
            worker.state = FleetState.READY
        self._events.news(worker, news)
        if worker.state is FleetState.DRAINING and news.state is WorkerState.DRAINED:
            self._remove(worker)

    def _late(self, worker: Worker) -> str:
        """What a worker has not done in time; empty where nothing is due."""
        now, placement = time.monotonic(), self._config.placement
        if worker.state is FleetState.STARTING:
            if now - worker.asked_at > placement.startup_timeout_s:
                return f"{worker.name} did not start within {placement.startup_timeout_s:g} s"
        elif worker.call is not None and now - worker.asked_at > NEWS_S + SILENT_S:
            return f"{worker.name} did not answer within {NEWS_S + SILENT_S:g} s"
        for group_id, (_, given_at) in worker.leases.items():
            if now - given_at > placement.step_timeout_s:
                return f"{worker.name} did not finish {group_id} in {placement.step_timeout_s:g} s"
        return ""

    def _lost(self, worker: Worker, error: BaseException) -> None:
        """Takes the leases of a lost worker away and starts it anew after a pause.

        Raises:
            LearnerLost: where it shares the learner's process, which must be replaced then.
        """
        self._gone(worker, error)
        if worker.state is FleetState.DRAINING:
            self._remove(worker)
            return
        if self._launcher.colocated:
            self._hold_back(worker)
            raise LearnerLost(
                f"{worker.name} failed in the learner's process: {worker.last_error}",
                details=getattr(error, "details", "") or str(error),
            ) from error
        self._count_restart(worker, error)
        worker.state = FleetState.WAITING
        pause_s = min(FIRST_BACKOFF_S * 2 ** min(worker.failures, 10), LONGEST_BACKOFF_S)
        worker.failures += 1
        worker.retry_at = time.monotonic() + pause_s

    def _gone(self, worker: Worker, error: BaseException) -> None:
        leases, worker.leases = list(worker.leases), {}
        actors.kill(worker.actor)
        worker.actor, worker.call, worker.memory, worker.policy_version = None, None, None, -1
        worker.last_error = str(error) if isinstance(error, RunError) else actors.message_of(error)
        self._timings.table.remove_process(worker.name)
        if leases:
            self._events.lost(leases, True)

    def _hold_back(self, worker: Worker) -> None:
        self.restarts += 1
        worker.restarts += 1
        worker.state, worker.retry_at = FleetState.WAITING, math.inf

    def _count_restart(self, worker: Worker, error: BaseException) -> None:
        self.restarts += 1
        worker.restarts += 1
        allowed = self._config.placement.worker_restarts
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
        if worker.actor is not None:
            if worker.state is FleetState.DRAINING:
                self._timings.request(worker.name, worker.actor, time.monotonic())
            worker.actor.close.remote()
            self._leaving.append((worker.actor, time.monotonic() + LEAVE_S))
        self._timings.table.remove_process(worker.name)
        del self.workers[worker.name]
        self._events.left(worker)


def _capacity(config: RunConfig) -> int:
    """Groups that fill the slots of a worker, and some that wait for a slot."""
    rollout = config.rollout
    filling = -(-rollout.decode.slots // rollout.completions_per_prompt)
    return filling + max(1, filling // 4)
