"""Held-out accuracy before and after a run, for several seeds.

    python -m benchmarks.objectives.seeds --config deploy/runs/guessing_cpu.yaml

Each run is `python -m driver --config FILE`; nothing but `run.seed` differs. `--folder` keeps the
runs; one that it has is read and not made again, so that a command that was stopped goes on.
"""

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.objectives.held_out_runs import HeldOutRun, RunFailed, finish_run


def gain(run: HeldOutRun) -> float:
    """Accuracy after the last step, less that before the first."""
    return run.accuracies[-1] - run.accuracies[0]


def table(runs: Mapping[int, HeldOutRun]) -> list[str]:
    """A line for each seed."""
    lines = ["| seed | before | after | gain | seconds |", "|---|---|---|---|---|"]
    for seed, run in runs.items():
        shown = f"{run.accuracies[0]:.3f} | {run.accuracies[-1]:.3f} | {gain(run):+.3f}"
        lines.append(f"| {seed} | {shown} | {run.seconds:.0f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where a gain is below `--least-gain` or a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="of a run that is evaluated at its start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=pathlib.Path, help="kept; default: temporary")
    parser.add_argument("--least-gain", type=float, default=0.3, help="that each must reach")
    given = parser.parse_args(arguments)
    if not (config := pathlib.Path(given.config)).is_file():
        parser.error(f"--config {given.config!r}: there is no such file")
    name = config.stem
    runs: dict[int, HeldOutRun] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or pathlib.Path(scratch)).resolve()
        for seed in given.seeds:
            try:
                runs[seed] = finish_run(str(config.absolute()), [], seed, folder / f"{name}-{seed}")
            except RunFailed as error:
                print(error, file=sys.stderr)
                return 1
            print(f"seed {seed}: {runs[seed].seconds:.0f} s", flush=True)
    print("\n".join(table(runs)))
    below = [str(seed) for seed, run in runs.items() if gain(run) < given.least_gain]
    if below:
        print(f"gain below {given.least_gain:g}: seed {', '.join(below)}", file=sys.stderr)
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
