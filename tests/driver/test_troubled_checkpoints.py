"""A run of the driver whose checkpoints fail, or leave behind what they should remove."""

import pytest

from driver.fleet.actor_calls import ActorFailed
from tests.driver import simulated_run
from tests.driver.simulated_run import SimulatedRun, World

FAILED = "learner failed in 'save': learner.durable.checkpoint.CheckpointFailed: [Errno {}] {}"


@pytest.mark.parametrize(
    "number, reason",
    [(5, "Input/output error"), (30, "Read-only file system"), (122, "Disk quota exceeded")],
)
def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_run_goes_on(
    tmp_path, monkeypatch, number, reason
):
    world, failed = World(), []

    def fault(place):
        if place == "learner save" and not failed:
            failed.append(place)
            raise ActorFailed(FAILED.format(number, reason))

    world.fault = fault
    run = SimulatedRun(tmp_path / "run", world, checkpoint__asynchronous=False).run(monkeypatch)
    assert run.error is None and world.saved is not None and world.saved[0] == 6
    assert len(run.said_of("step 2:", reason, "the run goes on from the one before")) == 1


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


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_a_run_that_ends_with_an_error_waits_for_the_one_under_way_and_names_the_bound(
    tmp_path, monkeypatch, ends_in_time
):
    world, failed = World(), []
    world.save_s = 10**6

    def close_slowly(self):
        return self.call("close", 60.0 if ends_in_time else 600.0, self.end)

    def fault(place):
        if place == "learner update" and world.process("learner").version == 4:
            failed.append(place)
            raise ActorFailed("the learner failed in 'update': ValueError: made up")

    monkeypatch.setattr(simulated_run.Learner, "close", close_slowly)
    world.fault = fault
    run = SimulatedRun(tmp_path / "run", world).run(monkeypatch)
    assert failed and isinstance(run.error, ActorFailed)
    assert len(run.said_of("waits up to 120 s for the checkpoint of step")) == 1
    late = run.said_of("the checkpoint of step", "was not complete within 120 s")
    assert len(late) == (0 if ends_in_time else 1)
