"""A run of the driver whose prompts end workers, hang the learner, or cannot be scored."""

import json

import pytest

from services.process.activity import Activity
from services.trajectories.data_order import index_of, prompt_at
from tests.driver.simulated_run import PROMPTS, SimulatedRun, World

BAD = "g00000002"


def test_a_prompt_that_ends_workers_is_set_aside_recorded_and_shown_R9(tmp_path, monkeypatch):
    world = World()
    world.deadly = {BAD}
    run = SimulatedRun(tmp_path / "run", world, placement__worker_restarts=1).run(monkeypatch)
    assert run.error is None, run.said
    assert len(set(world.trained)) == len(world.trained) == 24 and BAD not in world.trained
    (aside,) = json.loads((run.folder / "quarantine.json").read_text())["set_aside"]
    assert aside["group_id"] == BAD
    deaths = aside["deaths"]
    assert deaths in (2, 3), "twice beside other groups, and then alone"
    (said,) = run.said_of(f"is set aside (quarantine.json): {deaths} workers ended", BAD)
    assert said.startswith(f"prompt {aside['position']} of data.train")
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["rollout/prompts_set_aside"] == 1.0


def test_a_resume_does_not_lease_a_prompt_that_was_set_aside_R9(tmp_path, monkeypatch):
    record = {"position": position_of(BAD), "group_id": BAD, "deaths": 2, "cause": "made up"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "quarantine.json").write_text(
        json.dumps({"suspects": [], "set_aside": [record]})
    )
    world = World()
    world.deadly = {BAD}
    run = SimulatedRun(tmp_path / "run", world, placement__worker_restarts=0).run(monkeypatch)
    assert run.error is None, run.said
    assert BAD not in world.pushed and len(world.trained) == 24


def position_of(group_id: str) -> int:
    """The prompt of a group, in the order of a run of `simulated_run.py`."""
    return prompt_at(0, PROMPTS, index_of(group_id) or 0)[1]


@pytest.mark.parametrize("doing, replaced", [("optimizer", True), ("checkpoint", False)])
def test_a_learner_that_answers_and_hangs_is_replaced_R8(tmp_path, monkeypatch, doing, replaced):
    world = World()
    stands = Activity(doing=doing, counters={"programs": 7})
    world.at(40.0, lambda: setattr(world.process("learner"), "activity", stands))
    changes = {"placement__step_timeout_s": 120.0}
    run = SimulatedRun(tmp_path / "run", world, steps=30, **changes).run(monkeypatch)
    assert run.error is None and sorted(world.trained) == [f"g{i:08d}" for i in range(120)]
    said = run.said_of(
        "the learner: no progress for 1", " s in optimizer (programs 7)", "restart 1"
    )
    assert len(said) == replaced and len(run.said_of("restart ")) == replaced


def test_a_run_without_one_scored_completion_is_no_success_N07(tmp_path, monkeypatch):
    world = World()
    world.reward_error = "the gold answer 'B' is not a number"
    run = SimulatedRun(tmp_path / "run", world, steps=30).run(monkeypatch)
    assert str(run.error) == (
        "nothing was trained: each of 5 updates was skipped, the last one because no completion "
        "could be scored, the first for: the gold answer 'B' is not a number"
    )
    assert (run.status["state"], run.status["exit_code"]) == ("failed", 4)
    assert len(run.said_of("no completion was scored in 5 steps: the run ends here")) == 1


def test_a_run_that_ended_unscored_goes_on_once_its_scorers_are_mended(tmp_path, monkeypatch):
    world = World()
    world.reward_error = "the judge does not answer"
    folder = tmp_path / "run"
    assert SimulatedRun(folder, world, steps=8).run(monkeypatch).status["exit_code"] == 4
    again = SimulatedRun(folder, world, steps=8, run__resume=True).run(monkeypatch)
    assert again.status["exit_code"] == 4 and not again.said_of("the run ends here")
    world.reward_error = ""
    more = SimulatedRun(folder, world, steps=12, run__resume=True).run(monkeypatch)
    assert more.error is None and more.status["state"] == "finished"
    assert sorted(world.trained) == [f"g{i:08d}" for i in range(4 * 8, 4 * 12)]


def test_a_run_that_has_scored_goes_on_where_later_completions_cannot_be(tmp_path, monkeypatch):
    world = World()
    world.at(40.0, lambda: setattr(world, "reward_error", "the judge does not answer"))
    run = SimulatedRun(tmp_path / "run", world, steps=30).run(monkeypatch)
    assert run.error is None and run.status["state"] == "finished"
    assert run.status["step"] == 30 and not run.said_of("the run ends here")
    assert len(world.trained) < 4 * 30, "what could not be scored did not train"
