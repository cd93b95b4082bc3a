"""A run of the driver whose checkpoints fail, or leave behind what they should remove."""

import dataclasses

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
    run = SimulatedRun(tmp_path / "run", world).run(monkeypatch)
    assert run.error is None and world.saved is not None and world.saved[0] == 6
    assert len(run.said_of("step 2:", reason, "the run goes on from the one before")) == 1


def test_what_a_checkpoint_could_not_remove_is_reported_and_the_run_goes_on_R06(
    tmp_path, monkeypatch
):
    left = "step-00000002 cannot be removed: Device or resource busy; remove it yourself"
    save = simulated_run.Learner.save

    def save_and_leave(self, step, driver_state, scores):
        answer = save(self, step, driver_state, scores)
        make = answer._make
        if step == 4:
            answer._make = lambda: dataclasses.replace(make(), not_removed=[left])
        return answer

    monkeypatch.setattr(simulated_run.Learner, "save", save_and_leave)
    run = SimulatedRun(tmp_path / "run", World()).run(monkeypatch)
    assert run.error is None and run.world.saved[0] == 6
    assert run.said_of(left) == [f"step 4: {left}"]
