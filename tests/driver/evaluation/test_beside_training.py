"""Evaluation by workers that have nothing else to do, in a made-up world: what it may not change,
and what becomes of it when processes are lost.
"""

import json

import pytest

from services.wire.messages import NO_VERSION
from tests.driver.simulated_run import SimulatedRun, World

SLOW_UPDATE_S = 20.0
STEPS = 20
EVALUATES = {
    "eval__every_steps": 5,
    "eval__samples_per_prompt": 2,
    "eval__temperature": 1.0,
    "rollout__decode": {"slots": 4},
}
"""Six prompts with two completions each in four slots: three shares."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs the driver, asynchronous and bound by the learner."""
    count = iter(range(9))

    def one(world: World, **changes) -> SimulatedRun:
        world.update_s = SLOW_UPDATE_S
        changes = {"steps": STEPS, "rollout__max_staleness": 1} | changes
        folder = tmp_path / f"run-{next(count)}"
        return SimulatedRun(folder, world, **changes).run(monkeypatch)

    return one


def lines(run: SimulatedRun, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (run.folder / f"{name}.jsonl").read_text().splitlines()]


def evaluated(run: SimulatedRun) -> list[dict]:
    assert run.error is None, run.said
    return [line for line in lines(run) if "eval/step" in line]


def test_an_evaluation_takes_no_second_of_training(start):
    alone = start(World())
    beside = start(World(), **EVALUATES)
    assert [line["eval/step"] for line in evaluated(beside)] == [5, 10, 15]
    pairs = zip(lines(alone), lines(beside), strict=True)
    ratios = [two["time/train/step_s"] / one["time/train/step_s"] for one, two in pairs]
    assert max(ratios) < 1.02 and alone.world.trained == beside.world.trained
    assert all(line["time/eval_s"] == 0 for line in evaluated(beside))


def test_every_completion_is_of_the_version_of_the_evaluated_step(start):
    run = start(World(), **EVALUATES)
    asked = [request for _, request, _ in run.world.evaluated]
    assert len(asked) == 9 and all(request.when_idle for request in asked)
    assert {request.policy_version for request in asked} == {5, 10, 15}
    for line in evaluated(run):
        assert line["eval/policy_version"] == line["eval/step"] < line["step"]
        items = [one for one in lines(run, "eval") if one["step"] == line["step"]]
        assert {one["evaluated_step"] for one in items} == {line["eval/step"]}
        assert {one["policy_version"] for one in items} == {line["eval/step"]}
        assert len(items) == 12 == line["eval/completions"]
    assert len(run.said_of("step 5: evaluation under policy version 5: accuracy")) == 1


def test_shares_go_to_workers_without_a_lease_one_at_a_time(start):
    run = start(World(), **EVALUATES)
    assert all(held == 0 for _, _, held in run.world.evaluated)
    assert {name for name, _, _ in run.world.evaluated} == {"rollout-0", "rollout-1"}


def test_one_that_takes_too_long_is_waited_for_before_the_next_is_due(start):
    world = World()
    world.evaluate_s = 300.0
    found = evaluated(run := start(world, **EVALUATES))
    assert [(line["eval/step"], line["step"]) for line in found] == [(5, 9), (10, 14), (15, 20)]
    assert all(line["time/eval_s"] > 100 for line in found)
    assert sorted(run.world.trained) == [f"g{i:08d}" for i in range(4 * STEPS)]


def test_the_first_and_the_last_step_are_evaluated_while_training_waits(start):
    found = evaluated(run := start(World(), eval__at_start=True, eval__at_end=True, **EVALUATES))
    assert [line["eval/step"] for line in found] == [0, 5, 10, 15, 20]
    assert [line["step"] for line in found][::4] == [0, 20]
    waits = [request for _, request, _ in run.world.evaluated if not request.when_idle]
    assert {request.policy_version for request in waits} == {0, 20}


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__max_staleness": 0},
        {"eval__beside_training": False},
        {"eval__every_steps": 1},
    ],
)
def test_where_it_may_not_overlap_training_waits_as_ever(start, changes):
    found = evaluated(run := start(World(), **{**EVALUATES, **changes}))
    assert all(line["eval/step"] == line["step"] for line in found)
    assert not any(request.when_idle for _, request, _ in run.world.evaluated)


def test_the_share_of_a_worker_that_is_lost_goes_to_another(start):
    world = World()
    world.evaluate_s = 10.0
    world.at(130.0, lambda: world.process("rollout-0").end())
    run = start(world, **EVALUATES)
    assert [line["eval/step"] for line in evaluated(run)] == [5, 10, 15]
    assert all(line["eval/completions"] == 12 for line in evaluated(run))
    assert len(run.said_of("restart ")) == 1


def test_where_no_worker_holds_the_version_the_evaluation_is_left_out_and_training_goes_on(start):
    world = World()
    world.forgetful = True
    run = start(world, **EVALUATES)
    assert evaluated(run) == [] and not world.evaluated
    assert [line.split(":")[0] for line in run.said_of("its evaluation is left out")] == [
        "step 5",
        "step 10",
        "step 15",
    ]


@pytest.mark.parametrize("at_s", [125.0, 135.0, 150.0, 180.0])
def test_the_loss_of_the_learner_ends_it_and_the_step_is_evaluated_again(start, at_s):
    world = World()
    world.evaluate_s = 10.0
    world.at(at_s, lambda: world.process("learner").end())
    run = start(world, **EVALUATES)
    assert run.error is None, run.said
    kept = [line["eval/step"] for line in evaluated(run)]
    assert [step for step in (5, 10, 15) if step not in kept] in ([], [5])
    if 5 not in kept:
        assert run.said_of("step 5: its evaluation", "is left out")
    assert sorted(world.trained) == [f"g{i:08d}" for i in range(4 * STEPS)]


def test_workers_are_told_to_keep_no_version_once_it_is_complete(start):
    run = start(World(), **EVALUATES)
    workers = [one for one in run.world.processes if one.name.startswith("rollout")]
    assert {one._keeps for one in workers} == {NO_VERSION}


def test_a_checkpoint_is_told_what_was_evaluated_and_what_is_under_way(start):
    """So that the best one, or one that may be it, does not go."""
    world = World()
    world.evaluate_s = 300.0  # until the step before the next evaluation
    run = start(world, checkpoint__every_steps=6, **EVALUATES)
    assert run.error is None
    accuracy = {line["eval/step"]: line["eval/accuracy/strict"] for line in evaluated(run)}
    assert world.scores[6] == {5: None}
    assert world.scores[12] == {5: accuracy[5], 10: None}
    assert world.scores[20] == accuracy
    never = World()
    start(never, checkpoint__every_steps=6, checkpoint__keep_best=False, **EVALUATES)
    assert set(map(len, never.scores.values())) == {0}
