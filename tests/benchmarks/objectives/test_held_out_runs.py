"""What is read of the folder of a run."""

import json

import pytest

from benchmarks.objectives.held_out_runs import HeldOutRun, RunFailed, finish_run, read_run


@pytest.mark.parametrize(
    "state, expected",
    [("finished", HeldOutRun((0.28, 0.95), 90.0)), ("running", None), ("failed", None)],
)
def test_accuracies_and_seconds_are_those_of_a_run_that_finished(tmp_path, state, expected):
    status = {"state": state, "started": 1000.0, "ended": 1090.0}
    (tmp_path / "status.json").write_text(json.dumps(status))
    rows = [
        {"step": 0, "eval/step": 0, "eval/accuracy/strict": 0.28},
        {"step": 1, "train/loss": 0.1},
        {"step": 40, "eval/step": 40, "eval/accuracy/strict": 0.95},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path) == expected


@pytest.mark.parametrize("steps", [[], [0], [40], [20, 40]])
def test_a_run_that_was_not_evaluated_before_and_after_says_nothing_of_a_gain(tmp_path, steps):
    status = {"state": "finished", "started": 1000.0, "ended": 1090.0}
    (tmp_path / "status.json").write_text(json.dumps(status))
    rows = [{"step": step, "eval/step": step, "eval/accuracy/strict": 0.5} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path) is None


def test_a_run_of_another_configuration_is_not_taken_for_this_one(tmp_path):
    config, folder = tmp_path / "game.yaml", tmp_path / "game-0"
    config.write_text("run: {steps: 2}")
    folder.mkdir()
    with pytest.raises(RunFailed, match="has a run of another configuration"):
        finish_run(str(config), [], 0, folder)


def test_a_folder_without_a_run_has_none(tmp_path):
    assert read_run(tmp_path / "none") is None
