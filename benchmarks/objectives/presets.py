"""Held-out accuracy of the demo by preset: `python -m benchmarks.objectives.presets`.

Every run is `python -m driver` with the demo's configuration and its number of steps; nothing but
`--preset` and `run.seed` differs. `--folder` keeps the runs; one that it has is read and not made
again, so that a command that was stopped goes on.
"""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.objectives.held_out_runs import RunFailed, finish_run
from driver.config.presets import PRESETS

CONFIG = "deploy/runs/demo_cpu.yaml"


def table(found: Mapping[str, Mapping[int, Sequence[float]]]) -> list[str]:
    """A line for each preset: accuracy before, and after the last step for each seed."""
    seeds = sorted({seed for of_seed in found.values() for seed in of_seed})
    heads = ["preset", "before", *(f"seed {seed}" for seed in seeds), "least"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, of_seed in found.items():
        last = [of_seed[seed][-1] for seed in seeds]
        shown = [f"{each:.3f}" for each in (of_seed[seeds[0]][0], *last, min(last))]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where an accuracy is below `--least` or a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", nargs="*", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=pathlib.Path, help="kept; default: temporary")
    parser.add_argument("--least", type=float, default=0.8, help="accuracy that each must reach")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or pathlib.Path(scratch)).resolve()
        found: dict[str, dict[int, Sequence[float]]] = {}
        for name in given.preset:
            for seed in given.seeds:
                try:
                    preset = ["--preset", name]
                    run = finish_run(CONFIG, preset, seed, folder / f"{name}-{seed}")
                except RunFailed as error:
                    print(error, file=sys.stderr)
                    return 1
                its = run.accuracies
                print(f"{name}, seed {seed}: {its[0]:.3f} -> {its[-1]:.3f}", flush=True)
                found.setdefault(name, {})[seed] = its
    print("\n".join(table(found)))
    below = [name for name, its in found.items() if min(a[-1] for a in its.values()) < given.least]
    if below:
        print(f"below {given.least:g}: {', '.join(below)}", file=sys.stderr)
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
