"""Which workers count as lost or cut off, what is held against their groups, and from whom each
gets weights, without Ray.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from driver.config.sections.placement import PlacementConfig
from driver.fleet import fleet as fleet_module
from driver.fleet.actor_calls import ActorFailed, ActorLost, NoAnswer, StandsStill, blames_groups
from driver.fleet.fleet import WorkerFleet
from driver.fleet.fleet_worker import FleetEvents
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
    woke = False

    def now(self) -> float:
        return self.s

    def woke_lately(self, pause_s: float, within_s: float) -> bool:
        return self.woke


class Rooms:
    def state(self, room) -> RoomState:
        return RoomState(node="1f", host="a", problem="")


class Run:
    """A fleet of workers that are ready, in made-up time."""

    def __init__(self, monkeypatch, count: int):
        monkeypatch.setattr(fleet_module, "wait_for_calls", lambda calls, timeout_s: set())
        self.void: list[tuple[list[str], bool]] = []
        self.killed: list[tuple[list[Lease], str]] = []
        self.said: list[str] = []
        self.learner_answers_s = 1000.0
        self.explained = False
        self.clock: Any = Time()
        self.launcher: Any = Launcher()
        nothing: Any = None
        rooms: Any = Rooms()
        self.fleet = WorkerFleet(
            PlacementConfig(step_timeout_s=120.0),
            self.launcher,
            lambda name: nothing,
            FleetEvents(
                ended=lambda result: None,
                killed=self.note_killed,
                must_be_alone=lambda lease: False,
                void=lambda ids, expired: self.void.append((list(ids), expired)),
                news=lambda worker, news: None,
                joined=lambda worker, info: None,
                left=lambda worker: None,
                warn=self.said.append,
            ),
            TimingCollector(self.clock),
            rooms=rooms,
            clock=self.clock,
            capacity=2,
            relay_fanout=2,
            learner_answers_s=lambda: self.learner_answers_s,
        )
        self.workers = [self.fleet.add(nothing) for _ in range(count)]
        for worker in self.workers:
            worker.info, worker.state = INFO, WorkerState.READY
            worker.receive(news())

    def note_killed(self, begun: Sequence[Lease], cause: str) -> bool:
        self.killed.append((list(begun), cause))
        return self.explained

    def report(self, index: int, silent_s: float) -> None:
        """A worker's answer, with how long the learner has not answered it."""
        answer = dataclasses.replace(news(), learner_silent_s=silent_s)
        self.fleet._receive(self.workers[index], answer)


def lease_of(index: int) -> Lease:
    return Lease(group_id=f"g{index:08d}", attempt=0, epoch=0, position=index, min_policy_version=3)


def test_a_worker_that_answers_and_hangs_is_replaced_as_if_it_had_died_R8(monkeypatch):
    run = Run(monkeypatch, 1)
    worker, lease = run.workers[0], lease_of(0)
    run.fleet.dispatch_leases([lease])
    for second in range(10):
        worker.hangs.note(Activity(doing="decode", counters={"tokens": 7}), float(second))
    run.fleet.poll(0.0)
    assert not run.launcher.handles[0].killed
    for second in range(10, 12):
        worker.hangs.note(Activity(doing="decode", counters={"tokens": 7}), float(second))
    run.fleet.poll(0.0)
    assert run.launcher.handles[0].killed and worker.handle is None
    assert run.void == run.killed == [], "its host may be what was lost"
    run.clock.s += 1.0
    run.fleet.poll(0.0)
    assert run.void == [([lease.group_id], True)]
    ((begun, cause),) = run.killed
    assert begun == [lease]
    assert cause.startswith("rollout-0: no progress for 11 s in decode (tokens 7)")
    assert len(run.launcher.handles) == 2
    (said,) = run.said
    assert said == f"rollout-0 failed, restart 1 of 3: {cause}"


def test_workers_that_ended_while_the_driver_was_paused_are_neither_counted_nor_blamed_R04(
    monkeypatch,
):
    run = Run(monkeypatch, 7)
    run.fleet.dispatch_leases([lease_of(0)])
    for worker in [*run.fleet.workers.values()]:
        run.fleet._lost(worker, ActorLost("its process ended"))
    run.clock.s += 1.0
    run.clock.woke = True
    run.fleet.poll(0.0)
    assert len(run.said) == 7 and run.killed == []
    assert run.said[0] == "rollout-0 ended while this driver was paused: its process ended"
    assert run.void == [(["g00000000"], True)]


@pytest.mark.parametrize(
    "error, away_s, counts",
    [
        (ActorFailed("rollout-0: waited 60 s for policy version 3"), 0.0, False),
        (ActorFailed("rollout-0: waited 60 s for policy version 3"), 30.0, False),
        (ActorFailed("rollout-0: waited 60 s for policy version 3"), 1000.0, True),
        (ActorFailed("GroupsFailed: ValueError: a bad group"), 0.0, True),
        (ActorLost("its process ended"), 0.0, True),
    ],
)
def test_a_worker_that_gave_up_on_a_learner_that_was_away_uses_up_no_restart(
    monkeypatch, error, away_s, counts
):
    run = Run(monkeypatch, 1)
    run.learner_answers_s = away_s
    run.fleet._lost(run.workers[0], error)
    run.learner_answers_s = 1000.0
    run.clock.s += 1.0
    run.fleet.poll(0.0)
    (said,) = run.said
    assert ("restart 1 of 3" in said) is counts


def test_a_death_that_a_prompt_explains_uses_up_no_restart(monkeypatch):
    run = Run(monkeypatch, 1)
    run.explained = True
    for number in range(5):
        run.workers[0].state = WorkerState.READY
        run.workers[0].policy_version = 3
        run.fleet.dispatch_leases([lease_of(number)])
        run.fleet._lost(run.workers[0], ActorLost("its process ended"))
        run.clock.s += 60.0
        run.fleet.poll(0.0)
    assert run.said == 5 * ["rollout-0 failed: its process ended"] and len(run.killed) == 5


def test_a_worker_that_is_cut_off_from_the_learner_is_named_and_others_get_its_leases_F5(
    monkeypatch,
):
    run = Run(monkeypatch, 2)
    run.fleet.dispatch_leases([lease_of(0), lease_of(1)])
    run.report(0, 15.0)
    assert run.void == [] and len(run.fleet.ready()) == 2
    run.report(0, 20.0)
    assert run.void == [(["g00000000"], True)] and run.fleet.ready() == [run.workers[1]]
    assert run.said == [
        "rollout-0: no answer from the learner for 20 s, while both answer the driver: look for "
        "what cuts a off from the learner's host; its 1 leases go to others"
    ]
    assert run.workers[0].status(0.0).last_error.startswith("no answer from the learner for 20 s")
    assert run.launcher.handles[0].orders[-1].cancel == ("g00000000",)
    run.report(0, 25.0)
    assert len(run.said) == 1, "it is said once"
    run.fleet.dispatch_leases([lease_of(0)])
    assert set(run.workers[1].leases) == {"g00000000", "g00000001"} and not run.killed
    run.report(0, 0.0)
    assert len(run.fleet.ready()) == 2
    assert run.said[1] == "rollout-0 reaches the learner again, and takes leases"


def test_a_learner_that_is_away_for_the_driver_too_is_no_cut(monkeypatch):
    run = Run(monkeypatch, 2)
    run.learner_answers_s = 0.0
    run.fleet.dispatch_leases([lease_of(0)])
    run.report(0, 100.0)
    assert run.void == run.said == [] and len(run.fleet.ready()) == 2


def test_one_cut_worker_stays_beside_others_and_ends_where_no_other_reaches_the_learner(
    monkeypatch,
):
    run = Run(monkeypatch, 2)
    run.report(0, 30.0)
    run.clock.s += 700.0
    for worker in run.workers:
        worker.asked_at = run.clock.s
    run.fleet.poll(0.0)
    assert not any(handle.killed for handle in run.launcher.handles)
    run.report(1, 30.0)
    run.fleet.poll(0.0)
    assert run.launcher.handles[0].killed
    assert "has not reached the learner for 600 s, nor do others" in run.workers[0].last_error


def test_the_workers_of_a_host_get_their_weights_from_one_of_them_F09(monkeypatch):
    run = Run(monkeypatch, 4)
    for worker, address in zip(run.workers, ["a:1", "a:2", "b:1", "a:3"], strict=True):
        worker.info = dataclasses.replace(INFO, address=address)
    run.fleet.send_sources("learner:9")
    assert [handle.orders[-1].sources for handle in run.launcher.handles] == [
        ("learner:9",),
        ("a:1", "learner:9"),
        ("learner:9",),
        ("a:1", "learner:9"),
    ]
