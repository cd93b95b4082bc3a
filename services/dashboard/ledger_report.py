"""Whether the phases of every process add up to the wall time of every step.

    python -m services.dashboard.ledger_report --run DIR

Exit code 0 if they do within the bound, 1 if they do not, 2 if there is nothing to check.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence

from services.dashboard.facts import StepFacts
from services.dashboard.run_log import RunLog

BOUND = 0.01
WORST = 5
"""Lines that are shown."""


@dataclasses.dataclass(frozen=True)
class Imbalance:
    """How far the phases of one process are off the wall time of one step."""

    step: int
    process: str
    phases_s: float
    wall_s: float

    @property
    def error(self) -> float:
        """|sum of phases - wall| / wall."""
        return abs(self.phases_s - self.wall_s) / self.wall_s

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.process}: phases {self.phases_s:.4f} s, wall "
            f"{self.wall_s:.4f} s, {self.error * 100:.2f} % off"
        )


def imbalances(steps: Iterable[StepFacts]) -> list[Imbalance]:
    """Of every process in every step."""
    return [
        Imbalance(facts.step, process, sum(row.values()), facts.wall_s)
        for facts in steps
        for process, row in facts.processes.items()
    ]


def report(found: Sequence[Imbalance], bound: float) -> list[str]:
    """What is printed; the last line is the verdict."""
    worst = sorted(found, key=lambda one: one.error, reverse=True)
    median = statistics.median(one.error for one in found)
    beyond = sum(one.error > bound for one in found)
    return [
        *(str(one) for one in worst[:WORST]),
        f"{len({one.step for one in found})} steps, {len(found)} times a process in a step: "
        f"median {median * 100:.3f} % off, worst {worst[0].error * 100:.2f} %, "
        f"{beyond} beyond {bound * 100:g} %",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m services.dashboard.ledger_report",
        description="Whether the phases of every process add up to the wall time of every step.",
    )
    parser.add_argument("--run", required=True, type=pathlib.Path, metavar="DIR")
    parser.add_argument(
        "--bound", type=_share, default=BOUND, help="share of the wall time (default: %(default)g)"
    )
    given = parser.parse_args(arguments)
    try:
        found = imbalances(RunLog(given.run).refresh().new_steps)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not found:
        print(f"error: {given.run} has no closed step with metrics", file=sys.stderr)
        return 2
    print("\n".join(report(found, given.bound)))
    return int(any(one.error > given.bound for one in found))


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share of 0 to 1, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
