"""A run of the driver that skips prompts, in a made-up world that loses its learner."""

import json

import pytest

from tests.driver import simulated_run
from tests.driver.simulated_run import SimulatedRun, World

RULES = {"skip_after": 1, "epochs": 2, "most": 0.5}
PROMPTS, STEPS = 12, 24


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs the driver over a dozen prompts, some of which are always right."""
    monkeypatch.setattr(simulated_run, "PROMPTS", PROMPTS)
    count = iter(range(9))

    def one(world: World, **changes) -> SimulatedRun:
        world.equal = {1, 5, 8}
        run = SimulatedRun(tmp_path / f"run-{next(count)}", world, steps=STEPS, **changes)
        return run.run(monkeypatch)

    return one


def test_a_curriculum_is_counted_and_said_and_survives_the_loss_of_the_learner(start):
    whole, hurt = World(), World()
    for at_s in (40.0, 97.0, 150.0):
        hurt.at(at_s, lambda: hurt.process("learner").end())
    runs = [start(world, data__curriculum=RULES) for world in (whole, hurt)]
    assert [run.error for run in runs] == [None, None], runs[1].said
    assert hurt.trained == whole.trained, "the very same groups, in the same steps"
    lines = [json.loads(line) for line in (runs[0].folder / "metrics.jsonl").open()]
    assert max(line["rollout/prompts_skipped"] for line in lines) == 3
    skipped = lines[-1]["rollout/groups_skipped"]
    assert skipped > 10 and len(whole.trained) == 4 * STEPS
    assert len(runs[0].said_of("the curriculum skips", "prompts of equal rewards")) == 1
    every = [json.loads(line) for line in (runs[0].folder / "ledger.jsonl").open()]
    assert sum(len(line["groups"].get("skipped", ())) for line in every) == skipped


def test_without_a_curriculum_every_group_is_leased(start):
    run = start(world := World())
    assert run.error is None
    assert sorted(world.trained) == [f"g{index:08d}" for index in range(4 * STEPS)]
    assert not (run.folder / "curriculum.jsonl").exists()
