"""A run of the driver whose checkpoints fail, or leave behind what they should remove."""

import itertools
import signal

import pytest

from driver.accounting.jsonl import read_lines
from driver.errors import RunError
from driver.fleet.actor_calls import ActorFailed
from driver.signals import Interrupted
from services.process.driver_lease import LEASE_S
from tests.driver import simulated_run
from tests.driver.simulated_run import SimulatedRun, World

DISK = ["Input/output error", "Read-only file system", "Disk quota exceeded"]


@pytest.mark.parametrize("reason", DISK)
def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_run_goes_on(
    tmp_path, monkeypatch, reason
):
    world = World()
    world.save_problem = f"the checkpoint of step 2 could not be written: {reason}"
    run = SimulatedRun(tmp_path / "run", world, checkpoint__asynchronous=False).run(monkeypatch)
    assert run.error is None and world.saved is not None and world.saved[0] == 6
    assert len(run.said_of("step 2:", reason, "the run goes on from the one before")) == 1


def test_a_last_one_that_cannot_be_written_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    world = World()
    world.save_problem = "the checkpoint of step 1 could not be written: Input/output error"
    run = SimulatedRun(tmp_path / "run", world, steps=1).run(monkeypatch)
    assert isinstance(run.error, RunError)
    assert "step 1: the checkpoint of step 1 could not be written" in str(run.error)
    assert run.status["last_checkpoint"] is None


def test_one_that_fails_in_the_background_is_reported_with_the_next_step_and_the_run_goes_on(
    tmp_path, monkeypatch
):
    world, last = World(), []
    world.save_problem = "the checkpoint of step 2 could not be written: Input/output error"
    run = SimulatedRun(tmp_path / "run", world)
    world.fault = lambda place: last.append(run.status["last_checkpoint"])
    run.run(monkeypatch)
    assert run.error is None and world.saved is not None and world.saved[0] == 6
    told = run.said_of("step 2: the checkpoint of step 2", "the run goes on from the one before")
    assert len(told) == 1
    assert 2 not in last and 4 in last


def test_a_checkpoint_counts_only_once_it_is_complete(tmp_path, monkeypatch):
    world, seen = World(), []

    def note() -> None:
        done = world.saved[0] if world.saved else 0
        seen.append((run.status["step"], run.status["last_checkpoint"] or 0, done))

    run = SimulatedRun(tmp_path / "run", world, steps=9)
    world.fault = lambda place: note()
    run.run(monkeypatch)
    assert run.error is None and run.status["last_checkpoint"] == 9
    assert all(recorded <= done for _, recorded, done in seen)
    assert any(step > done >= 2 for step, _, done in seen), "training never went on beside it"


def test_a_learner_that_dies_while_one_is_written_is_replaced_from_the_one_before(
    tmp_path, monkeypatch
):
    world, killed = World(), []

    def kill_once(place: str) -> None:
        if place == "learner update" and world.process("learner").version == 5 and not killed:
            assert world.saved is not None
            killed.append(world.saved[0])
            world.process("learner").end()

    world.fault = kill_once
    run = SimulatedRun(tmp_path / "run", world, steps=8).run(monkeypatch)
    assert run.error is None and killed == [2]
    assert len(run.said_of("resumed at step 2")) == 1
    assert world.saved is not None and world.saved[0] == 8
    assert sorted(world.trained) == [f"g{i:08d}" for i in range(4 * 8)]


@pytest.mark.parametrize("background", [True, False])
def test_what_a_checkpoint_could_not_remove_is_reported_and_the_run_goes_on_R06(
    tmp_path, monkeypatch, background
):
    left = "step-00000002 cannot be removed: Device or resource busy; remove it yourself"
    world = World()
    world.left = [left]
    changes = {} if background else {"checkpoint__asynchronous": False}
    run = SimulatedRun(tmp_path / "run", world, **changes).run(monkeypatch)
    assert run.error is None and world.saved is not None and world.saved[0] == 6
    assert run.said_of(left) == [f"step {step}: {left}" for step in (2, 4, 6)]


def failing_update(world, *, makes):
    """Ends the run with the update that makes a version; returns when that was."""
    failed_at_s = []

    def fault(place):
        if place == "learner update" and world.process("learner").version == makes:
            failed_at_s.append(world.now_s)
            raise ActorFailed("the learner failed in 'update': ValueError: made up")

    world.fault = fault
    return failed_at_s


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_a_run_that_ends_with_an_error_waits_for_the_one_under_way_and_names_the_bound(
    tmp_path, monkeypatch, ends_in_time
):
    world, asked_s = World(), []
    world.save_s, world.close_s = 10**6, 100.0 if ends_in_time else 600.0
    ask = simulated_run.Learner.health

    def noted(self):
        asked_s.append(world.now_s)
        return ask(self)

    monkeypatch.setattr(simulated_run.Learner, "health", noted)
    failed_at_s = failing_update(world, makes=4)
    run = SimulatedRun(tmp_path / "run", world).run(monkeypatch)
    assert failed_at_s and isinstance(run.error, ActorFailed)
    assert run.said_of("waits up to") == ["waits up to 120 s for the checkpoint of step 2"]
    late = run.said_of("the checkpoint of step 2 was not complete within 120 s")
    assert len(late) == (0 if ends_in_time else 1)
    assert run.status["last_checkpoint"] == (2 if ends_in_time else None)
    assert asked_s[-1] - failed_at_s[0] > 90, "a learner that nobody asks ends itself"
    assert max(b - a for a, b in itertools.pairwise(asked_s)) < LEASE_S / 4
    assert world.now_s - failed_at_s[0] < 180


def test_a_run_that_ends_with_an_error_waits_for_none_that_is_complete(tmp_path, monkeypatch):
    world = World()
    world.save_s, world.close_s = 10**6, 600.0
    close = simulated_run.Learner.close

    def complete_then_close(self):
        self._finish_saving()  # since the driver last heard of it
        return close(self)

    monkeypatch.setattr(simulated_run.Learner, "close", complete_then_close)
    failed_at_s = failing_update(world, makes=4)
    run = SimulatedRun(tmp_path / "run", world).run(monkeypatch)
    assert isinstance(run.error, ActorFailed) and not run.said_of("waits up to")
    assert world.now_s - failed_at_s[0] < 60


@pytest.mark.parametrize("last_fails", [False, True])
def test_a_signal_while_one_is_begun_loses_no_report_and_writes_it_once(
    tmp_path, monkeypatch, last_fails
):
    world, places = World(), []
    world.save_s = 10**6  # the one of step 2 is still being written when that of step 4 is begun
    world.save_problem = "the checkpoint of step 2 could not be written: made up"
    world.fault = places.append
    begin = simulated_run.Learner.begin_save

    def interrupted(self, step, *rest):
        answer = begin(self, step, *rest)
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            if last_fails:
                world.at(0.1, lambda: setattr(world, "save_problem", "disk gone"))
        return answer

    monkeypatch.setattr(simulated_run.Learner, "begin_save", interrupted)
    run = SimulatedRun(tmp_path / "run", world).run(monkeypatch)
    assert isinstance(run.error, Interrupted) and run.ended_in_checkpoint(130)
    assert run.status["last_checkpoint"] == 4
    assert len(run.said_of("step 2: the checkpoint of step 2 could not be written")) == 1
    assert places.count("learner save") == (1 if last_fails else 0)
    assert len(run.said_of("step 4: disk gone")) == (1 if last_fails else 0)


def test_a_signal_is_heard_while_the_disk_keeps_the_next_one_from_being_begun(
    tmp_path, monkeypatch
):
    world = World()

    def hanging(self, step, *rest):
        world.at(5.0, lambda: signal.raise_signal(signal.SIGINT))
        return self.call("begin_save", 500.0, lambda: None)

    monkeypatch.setattr(simulated_run.Learner, "begin_save", hanging)
    run = SimulatedRun(tmp_path / "run", world).run(monkeypatch)
    assert isinstance(run.error, Interrupted) and run.ended_in_checkpoint(130)
    assert run.status["last_checkpoint"] == 2
    assert run.said_at_s[-1] - run.said_at_s[0] < 200


def test_a_signal_while_one_is_written_waits_for_it_and_writes_no_other(tmp_path, monkeypatch):
    saved, save = [], simulated_run.Learner.save

    def interrupted(self, step, *rest):
        saved.append(step)
        if saved == [2, 4]:
            signal.raise_signal(signal.SIGTERM)
        return save(self, step, *rest)

    monkeypatch.setattr(simulated_run.Learner, "save", interrupted)
    run = SimulatedRun(tmp_path / "run", World(), checkpoint__asynchronous=False).run(monkeypatch)
    assert isinstance(run.error, Interrupted) and run.ended_in_checkpoint(143)
    assert run.status["last_checkpoint"] == 4 and saved == [2, 4]


def test_what_a_checkpoint_cost_is_in_the_step_whose_update_found_it_complete(
    tmp_path, monkeypatch
):
    world = World()
    world.save_s = 0.2
    run = SimulatedRun(tmp_path / "run", world, steps=9).run(monkeypatch)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    costs = [line for line in lines if "checkpoint/write_s" in line]
    assert run.error is None and [line["step"] for line in costs] == [3, 5, 7, 9]
    assert {(line["checkpoint/blocked_s"], line["checkpoint/write_s"]) for line in costs} == {
        (0.5, 2.0)
    }
