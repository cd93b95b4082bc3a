"""Keeps the fleet at the size that is wanted, and answers requests for another size.

The wish comes from the configuration, from a person (`python -m driver.scale`) or from
`policy: balance`; the step loop calls `turn` while it waits, and `judge` once a step.
"""

import time
from collections import deque
from collections.abc import Callable

from ray.util.placement_group import PlacementGroup

from driver.accounting.ledger import StepRecord
from driver.accounting.queue_gauges import Gauge
from driver.config.sections.placement import PlacementConfig
from driver.fleet.balance import BalanceRule, BalanceState, balance, waits_of
from driver.fleet.cluster import ResourcesNotMet, WorkerRoom, release
from driver.fleet.control_server import ControlBox, Drain, FleetRequest, new_target
from driver.fleet.fleet import WorkerFleet
from driver.fleet.fleet_worker import Worker
from driver.fleet.rooms import Room
from rollout_worker.config.rollout_config import WorkersConfig
from services.control import messages as control
from services.control.messages import NoSuchWorker, NotNow, OutOfBounds

SHOW_S = 0.5
"""Between two snapshots of the fleet, and between two checks for room."""
RATE_S = 10.0
"""Window of a worker's tokens a second."""


class Scaler:
    """Adds and drains rollout workers."""

    def __init__(
        self,
        workers: WorkersConfig,
        placement: PlacementConfig,
        fleet: WorkerFleet,
        group: PlacementGroup,
        box: ControlBox,
        say: Callable[[str], None],
        *,
        learner: Callable[[], control.LearnerStatus | None],
    ):
        """Args:
        group: of the learner and the initial workers.
        box: where requests arrive and snapshots of the fleet are shown.
        say: shows one line.
        learner: how the learner is, as it last reported.
        """
        self._workers = workers
        self._placement = placement
        self._fleet = fleet
        self._group = group
        self._box = box
        self._say = say
        self._learner = learner
        self._free: list[Room] = []
        """Bundles of the first group whose worker was drained."""
        self._asked: WorkerRoom | None = None
        self._notice = ""
        self._balance = BalanceState()
        self._shown_at = 0.0
        self._tokens: dict[str, deque[tuple[float, int]]] = {}
        self.target = self._workers.at_start

    def turn(self, step: int, queues: Gauge) -> None:
        """Answers requests, and takes the next step towards the target; never waits."""
        requests = self._box.take_requests()
        for request in requests:
            self._answer(request, step, queues)
        # A wish is followed at once: a worker that is to leave gets no lease of the next step.
        if not requests and time.monotonic() - self._shown_at < SHOW_S:
            return
        self._shown_at = time.monotonic()
        self._follow()
        self._box.show_fleet(self._snapshot(step, queues))

    def release_room(self, worker: Worker) -> None:
        """Keeps or gives back the room of a worker that is gone."""
        self._tokens.pop(worker.name, None)
        self._say(f"{worker.name} has left")
        if worker.room.shared:
            self._free.append(worker.room)
        else:
            release(worker.room.group)

    def judge_step(self, record: StepRecord, gaps: set[str]) -> None:
        """With `policy: balance`: changes the target if recent steps ask for it.

        Args:
            gaps: workers that did not run during the whole step.
        """
        if self._workers.policy != "balance":
            return
        there = {name: row for name, row in record.processes.items() if name not in gaps}
        self._balance, change = balance(
            self._balance,
            waits_of(there, record.wall_s),
            workers=len(there) - 1,
            target=self.target,
            least=self._workers.min,
            most=self._workers.max,
            rule=BalanceRule(),
        )
        if change:
            self.target += change
            who = "the learner waits for groups" if change > 0 else "workers wait for the learner"
            self._say(f"step {record.step}: {who}: {self.target} rollout workers from now on")

    def _answer(self, request: FleetRequest, step: int, queues: Gauge) -> None:
        fleet = self._snapshot(step, queues)
        try:
            if self._placement.mode == "colocated":
                raise OutOfBounds(
                    "placement.mode=colocated has one rollout worker, in the learner's process: "
                    "to have more, end the run and --resume it with placement.mode=separate"
                )
            self.target = new_target(request.wish, fleet)
        except (OutOfBounds, NoSuchWorker, NotNow) as error:
            request.refuse(error)
            return
        self._notice = ""
        self._balance = BalanceState()
        if isinstance(request.wish, Drain):
            self._fleet.drain(request.wish.name)
        self._say(f"asked for: {self.target} rollout workers")
        self._box.show_fleet(self._snapshot(step, queues))
        request.accept(self.target, fleet.current)

    def _follow(self) -> None:
        staying = self._staying()
        if len(staying) >= self.target and self._asked is not None:
            release(self._asked.group)
            self._asked = None
        if len(staying) < self.target:
            self._add(len(staying))
        while len(staying) > self.target:
            leaving = _first_to_go(staying)
            staying.remove(leaving)
            self._fleet.drain(leaving.name)

    def _add(self, there: int) -> None:
        if self._free:
            self._fleet.add(self._free.pop(0))
            return
        if self._asked is None:
            name = f"rollout worker {there + 1}"
            self._asked = WorkerRoom(self._placement, name, self._group)
        try:
            if not self._asked.is_there():
                self._notice = self._asked.waiting()
                return
        except ResourcesNotMet as error:
            self._asked, self.target, self._notice = None, there, str(error)
            self._say(f"{error}\nthe run goes on with {there} rollout workers")
            return
        self._fleet.add(Room(self._asked.group, 0, shared=False))
        self._asked, self._notice = None, ""

    def _staying(self) -> list[Worker]:
        return [
            w for w in self._fleet.workers.values() if w.state is not control.WorkerState.DRAINING
        ]

    def _snapshot(self, step: int, queues: Gauge) -> control.FleetStatus:
        return control.FleetStatus(
            target=self.target,
            least=self._workers.min,
            most=self._workers.max,
            policy=control.ScalingPolicy(self._workers.policy),
            step=step,
            policy_version=queues.policy_version,
            workers=tuple(
                worker.status(self._rate(worker)) for worker in self._fleet.workers.values()
            ),
            notice=self._notice or self._fleet.replacement.waiting_for_room(),
            groups_waiting=queues.waiting,
            groups_out=queues.out,
            learner=self._learner(),
        )

    def _rate(self, worker: Worker) -> float:
        now = time.monotonic()
        seen = self._tokens.setdefault(worker.name, deque())
        seen.append((now, worker.tokens))
        while len(seen) > 1 and now - seen[0][0] > RATE_S:
            seen.popleft()
        seconds = now - seen[0][0]
        return (worker.tokens - seen[0][1]) / seconds if seconds > 0 else 0.0


def _first_to_go(workers: list[Worker]) -> Worker:
    """One that does not work yet, else the youngest name."""
    idle = [worker for worker in workers if not worker.takes_leases]
    return (idle or workers)[-1]
