"""The table of presets: what it reads of a run, and what it prints."""

import json

import pytest

from benchmarks.objectives.presets import accuracies, table


@pytest.mark.parametrize(
    "state, expected", [("finished", [0.28, 0.95]), ("running", []), ("failed", [])]
)
def test_accuracies_are_those_of_a_run_that_finished(tmp_path, state, expected):
    (tmp_path / "status.json").write_text(json.dumps({"state": state}))
    rows = [
        {"step": 0, "eval/accuracy/strict": 0.28},
        {"step": 1, "train/loss": 0.1},
        {"step": 40, "eval/accuracy/strict": 0.95},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert accuracies(tmp_path) == expected


def test_a_folder_without_a_run_has_no_accuracies(tmp_path):
    assert accuracies(tmp_path / "none") == []


def test_the_table_names_the_least_of_the_seeds():
    found = {"grpo": {0: [0.28, 0.5, 0.9], 1: [0.27, 0.85]}, "rloo": {0: [0.28, 0.7], 1: [0.1, 1]}}
    assert table(found) == [
        "| preset | before | seed 0 | seed 1 | least |",
        "|---|---|---|---|---|",
        "| `grpo` | 0.280 | 0.900 | 0.850 | 0.850 |",
        "| `rloo` | 0.280 | 0.700 | 1.000 | 0.700 |",
    ]
