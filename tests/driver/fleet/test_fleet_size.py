"""What the scaler shows of a fleet and decides after a step, without a cluster."""

import types
from typing import Any

import pytest

from driver.accounting.ledger import StepRecord
from driver.accounting.queue_gauges import Gauge
from driver.config.sections.placement import PlacementConfig
from driver.fleet.control_server import ControlBox, FleetRequest, Scale
from driver.fleet.fleet_size import RATE_S, SHOW_S, Scaler
from driver.fleet.fleet_worker import Worker
from rollout_worker.config.rollout_config import WorkersConfig
from services.control.messages import LearnerStatus, OutOfBounds, WorkerState

ROOM: Any = None
BUSY, WAITS = {"decode": 10.0}, {"idle": 10.0}


class Fleet:
    """The workers of a run, as the scaler looks at them."""

    def __init__(self, count: int):
        self.workers = {
            f"rollout-{i}": Worker(name=f"rollout-{i}", room=ROOM, state=WorkerState.WORKING)
            for i in range(count)
        }
        self.drained: list[str] = []
        self.replacement = types.SimpleNamespace(waiting_for_room=lambda: "")

    def drain(self, name: str) -> None:
        self.drained.append(name)


class Run:
    """A scaler over so many workers, in made-up time."""

    def __init__(
        self, monkeypatch, count: int = 2, policy: str = "balance", mode: str = "separate"
    ):
        self.now_s = 100.0
        monkeypatch.setattr("driver.fleet.fleet_size.time.monotonic", lambda: self.now_s)
        workers = WorkersConfig.model_validate(
            {"start": count, "min": 1, "max": 4, "policy": policy}
        )
        self.fleet: Any = Fleet(count)
        self.box = ControlBox(workers)
        self.said: list[str] = []
        self.scaler = Scaler(
            workers,
            PlacementConfig.model_validate({"mode": mode}),
            self.fleet,
            ROOM,
            self.box,
            self.said.append,
            learner=lambda: LearnerStatus(doing="update", policy_version=8),
        )

    def judge(self, gaps: set[str], **processes: dict[str, float]) -> None:
        rows = {name.replace("_", "-"): row for name, row in processes.items()}
        self.scaler.judge_step(
            StepRecord(
                step=1,
                wall_s=10.0,
                processes=rows,
                overlap_s={},
                absent_s={},
                groups={},
                sources={},
                outstanding=0,
                warnings=(),
            ),
            gaps,
        )


def test_the_snapshot_has_queues_learner_and_the_rate_over_a_window(monkeypatch):
    run = Run(monkeypatch, count=1)
    worker = run.fleet.workers["rollout-0"]
    worker.tokens = 1_000_000
    for _ in range(100):
        run.now_s += SHOW_S
        worker.tokens += 50
        run.scaler.turn(7, Gauge(run.now_s, 3, 5, 6))
    snapshot = run.box.fleet()
    assert (snapshot.step, snapshot.policy_version) == (7, 6)
    assert (snapshot.groups_waiting, snapshot.groups_out, snapshot.target) == (3, 5, 1)
    assert snapshot.learner == LearnerStatus(doing="update", policy_version=8)
    assert snapshot.workers[0].state is WorkerState.WORKING
    assert snapshot.workers[0].tokens_per_s == pytest.approx(50 / SHOW_S)
    run.now_s += RATE_S + 1
    for _ in range(2):
        run.now_s += SHOW_S
        run.scaler.turn(7, Gauge(run.now_s, 3, 5, 6))
    assert run.box.fleet().workers[0].tokens_per_s < 5, "what was decoded long ago counts no more"


def test_a_snapshot_is_made_twice_a_second(monkeypatch):
    run = Run(monkeypatch)
    run.scaler.turn(1, Gauge(run.now_s, 0, 0, 0))
    run.now_s += SHOW_S / 2
    run.scaler.turn(2, Gauge(run.now_s, 0, 0, 0))
    assert run.box.fleet().step == 1


def test_a_worker_that_has_left_does_not_speak_for_the_others(monkeypatch):
    """Those that stay wait: one fewer would do, whatever the one that left did before."""
    run = Run(monkeypatch, count=2)
    for _ in range(5):
        run.judge({"rollout-2"}, learner=BUSY, rollout_0=WAITS, rollout_1=WAITS, rollout_2=BUSY)
    assert run.scaler.target == 1
    assert run.said == ["step 1: workers wait for the learner: 1 rollout workers from now on"]


def test_while_a_worker_is_missing_steps_say_nothing(monkeypatch):
    run = Run(monkeypatch, count=2)
    for _ in range(8):
        run.judge({"rollout-1"}, learner=WAITS, rollout_0=BUSY, rollout_1={})
    assert run.scaler.target == 2 and run.said == []


def test_a_learner_that_waits_gets_one_worker_more(monkeypatch):
    run = Run(monkeypatch, count=2)
    for _ in range(5):
        run.judge(set(), learner=WAITS, rollout_0=BUSY, rollout_1=BUSY)
    assert run.scaler.target == 3
    fixed = Run(monkeypatch, policy="fixed")
    for _ in range(5):
        fixed.judge(set(), learner=WAITS, rollout_0=BUSY, rollout_1=BUSY)
    assert fixed.scaler.target == 2


def test_a_colocated_run_is_not_scaled_and_says_what_to_do(monkeypatch):
    run = Run(monkeypatch, count=1, policy="fixed", mode="colocated")
    request = FleetRequest(Scale(target=2))
    monkeypatch.setattr(run.box, "take_requests", lambda: [request])
    run.scaler.turn(1, Gauge(run.now_s, 0, 0, 0))
    with pytest.raises(OutOfBounds, match="one rollout worker.*placement.mode=separate"):
        request.answer.result(0.0)
    assert run.scaler.target == 1


def test_all_that_are_to_leave_are_drained_when_it_is_asked_for(monkeypatch):
    run = Run(monkeypatch, count=4, policy="fixed")
    run.scaler.turn(1, Gauge(run.now_s, 0, 0, 0))
    requests = [FleetRequest(Scale(target=2))]
    monkeypatch.setattr(run.box, "take_requests", lambda: [requests.pop()] if requests else [])
    run.scaler.turn(1, Gauge(run.now_s, 0, 0, 0))
    assert run.said == ["asked for: 2 rollout workers"]
    assert run.fleet.drained == ["rollout-3", "rollout-2"], "before any lease is granted"
