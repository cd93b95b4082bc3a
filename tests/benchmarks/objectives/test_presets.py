"""The table of presets."""

from benchmarks.objectives.presets import table


def test_the_table_names_the_least_of_the_seeds():
    found = {"grpo": {0: [0.28, 0.5, 0.9], 1: [0.27, 0.85]}, "rloo": {0: [0.28, 0.7], 1: [0.1, 1]}}
    assert table(found) == [
        "| preset | before | seed 0 | seed 1 | least |",
        "|---|---|---|---|---|",
        "| `grpo` | 0.280 | 0.900 | 0.850 | 0.850 |",
        "| `rloo` | 0.280 | 0.700 | 1.000 | 0.700 |",
    ]
