"""Which losses of a worker are held against the groups that it had begun, without Ray."""

from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from driver.config.run_config import PlacementConfig
from driver.fleet import fleet as fleet_module
from driver.fleet.actor_calls import ActorFailed, ActorLost, NoAnswer, StandsStill, blames_groups
from driver.fleet.fleet import FleetEvents, WorkerFleet
from driver.fleet.rooms import RoomState
from driver.fleet.timing_collector import TimingCollector
from services.control.messages import WorkerState
from services.process.activity import Activity
from services.wire.messages import Lease
from tests.driver.fleet.test_fleet_worker import INFO, news

NODE_DIED = "The actor died because its node has died. Node Id: 1f"
DIED = "The worker died unexpectedly: Node IP 10.0.0.1, exit type SYSTEM_ERROR"


def died(text: str) -> ActorLost:
    error = ActorDiedError()
    error.error_msg = text
    return ActorLost.by(error)


@pytest.mark.parametrize(
    "error, expected",
    [
        (died(DIED), True),
        (died(NODE_DIED), False),
        (ActorFailed("rollout-0 failed in 'news': rollout-loop failed: GroupsFailed: x"), True),
        (ActorFailed("rollout-0 failed in 'news': group-pusher failed: PushFailed: x"), False),
        (NoAnswer("rollout-0 did not answer within 65 s"), False),
        (StandsStill("rollout-0: no progress", doing="decode"), True),
        (StandsStill("rollout-0: no progress", doing="reward"), True),
        (StandsStill("rollout-0: no progress", doing="weights_swap"), False),
        (StandsStill("rollout-0: no progress", doing="push"), False),
    ],
)
def test_only_completing_and_scoring_is_the_doing_of_a_group(error, expected):
    assert blames_groups(error) is expected


class Handle:
    """A worker's process whose answers a test gives."""

    def __init__(self):
        self.killed = False
        self.orders: list[Any] = []

    def order(self, orders) -> None:
        self.orders.append(orders)

    def news(self, wait_s) -> object:
        return object()

    def kill(self) -> None:
        self.killed = True


class Launcher:
    colocated = False

    def __init__(self):
        self.handles: list[Handle] = []

    def start_worker(self, spec, room):
        self.handles.append(Handle())
        return self.handles[-1], object()


class Time:
    s = 0.0

    def now(self) -> float:
        return self.s


class Rooms:
    def state(self, room) -> RoomState:
        return RoomState(node="1f", host="a", problem="")


def test_a_worker_that_answers_and_hangs_is_replaced_as_if_it_had_died_R8(monkeypatch):
    seen: dict[str, list] = {"void": [], "killed": [], "said": []}
    events = FleetEvents(
        ended=lambda result: None,
        killed=lambda begun, cause: seen["killed"].append((begun, cause)),
        must_be_alone=lambda lease: False,
        void=lambda ids, expired: seen["void"].append((list(ids), expired)),
        news=lambda worker, news: None,
        joined=lambda worker, info: None,
        left=lambda worker: None,
        warn=seen["said"].append,
    )
    launcher: Any = Launcher()
    room: Any = None
    spec: Any = None
    clock: Any = Time()
    fleet = WorkerFleet(
        PlacementConfig(step_timeout_s=120.0),
        launcher,
        lambda name: spec,
        events,
        TimingCollector(clock),
        rooms=Rooms(),
        clock=clock,
        capacity=2,
        relay_fanout=2,
    )
    monkeypatch.setattr(fleet_module, "wait_for_calls", lambda calls, timeout_s: set())
    worker = fleet.add(room)
    worker.info, worker.state = INFO, WorkerState.READY
    worker.receive(news())
    lease = Lease(group_id="g00000000", attempt=0, epoch=0, position=5, min_policy_version=3)
    fleet.dispatch_leases([lease])
    for second in range(10):
        worker.hangs.note(Activity(doing="decode", counters={"tokens": 7}), float(second))
    fleet.poll(0.0)
    assert not launcher.handles[0].killed
    for second in range(10, 12):
        worker.hangs.note(Activity(doing="decode", counters={"tokens": 7}), float(second))
    fleet.poll(0.0)
    assert launcher.handles[0].killed and worker.handle is None
    assert seen["void"] == seen["killed"] == [], "its host may be what was lost"
    clock.s += 1.0
    fleet.poll(0.0)
    assert seen["void"] == [(["g00000000"], True)]
    ((begun, cause),) = seen["killed"]
    assert begun == [lease] and cause == "rollout-0: no progress for 11 s in decode (tokens 7)"
    assert len(launcher.handles) == 2
    assert seen["said"] == [
        "rollout-0 failed, restart 1 of 3: rollout-0: no progress for 11 s in decode (tokens 7)"
    ]
