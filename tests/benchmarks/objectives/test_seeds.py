"""The table of seeds, and what the command makes of it; the runs are in its folder already."""

import json

from benchmarks.objectives import seeds
from benchmarks.objectives.held_out_runs import HeldOutRun


def finished(folder, *accuracies):
    """Writes what the command reads of a run."""
    folder.mkdir()
    status = {"state": "finished", "started": 0.0, "ended": 120.0}
    (folder / "status.json").write_text(json.dumps(status))
    rows = [json.dumps({"eval/accuracy/strict": one}) for one in accuracies]
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
    finished(tmp_path / "game-0", 0.2, 0.9)
    finished(tmp_path / "game-1", 0.2, 0.45)
    given = ["--config", "game.yaml", "--folder", str(tmp_path)]
    assert seeds.main([*given, "--seeds", "0"]) == 0
    assert seeds.main([*given, "--seeds", "0", "1"]) == 1
    assert capsys.readouterr().err == "gain below 0.3: seed 1\n"
