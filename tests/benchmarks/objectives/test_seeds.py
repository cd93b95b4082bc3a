"""The table of seeds, and what the command makes of it; the runs are in its folder already."""

import json

import pytest

from benchmarks.objectives import seeds
from benchmarks.objectives.held_out_runs import HeldOutRun


def finished(folder, *accuracies):
    """Writes what the command reads of a run."""
    folder.mkdir()
    status = {"state": "finished", "started": 0.0, "ended": 120.0}
    (folder / "status.json").write_text(json.dumps(status))
    rows = [
        json.dumps({"eval/step": step, "eval/accuracy/strict": one})
        for step, one in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(rows))


def test_the_table_has_a_line_for_each_seed():
    runs = {0: HeldOutRun((0.25, 0.5, 0.9), 100.4), 3: HeldOutRun((0.3, 0.2), 99.0)}
    assert seeds.table(runs) == [
        "| seed | before | after | gain | seconds |",
        "|---|---|---|---|---|",
        "| 0 | 0.250 | 0.900 | +0.650 | 100 |",
        "| 3 | 0.300 | 0.200 | -0.100 | 99 |",
    ]


def test_a_seed_that_gains_too_little_is_named(tmp_path, capsys):
    config = tmp_path / "game.yaml"
    config.write_text("run: {steps: 1}")
    for seed, after in enumerate((0.9, 0.45)):
        finished(tmp_path / f"game-{seed}", 0.2, after)
        note = json.dumps([config.read_text()])
        (tmp_path / f"game-{seed}.given.json").write_text(note)
    given = ["--config", str(config), "--folder", str(tmp_path)]
    assert seeds.main([*given, "--seeds", "0"]) == 0
    assert seeds.main([*given, "--seeds", "0", "1"]) == 1
    assert capsys.readouterr().err == "gain below 0.3: seed 1\n"
    with pytest.raises(SystemExit):
        seeds.main(["--config", str(tmp_path / "none.yaml")])
    assert "there is no such file" in capsys.readouterr().err
