"""Checks that the phases of every process add up to the wall time of every step.

    python -m diagnosis.ledger_report --run DIR

`unexplained` is the rest of the wall time, so that a sum is only off if seconds are counted twice
or a line is damaged. The share of `unexplained` shows how complete the ledger is. A single step may
have much of it on a busy machine, so the median of a process counts.

Exit code 0 if both are within their bounds, 1 if one is not, 2 if there is nothing to check.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence

from diagnosis.records.facts import StepFacts
from diagnosis.records.run_log import RunLog
from services.process.phases import UNEXPLAINED

BOUND = 0.01
UNEXPLAINED_BOUND = 0.05
WORST = 5
"""Lines of sums that are shown."""


@dataclasses.dataclass(frozen=True)
class ProcessInStep:
    """One process in one step."""

    step: int
    process: str
    phases_s: float
    """Includes seconds in which it was not running, which have no phase."""
    unexplained_s: float
    wall_s: float

    @property
    def error(self) -> float:
        """|sum of phases - wall| / wall."""
        return abs(self.phases_s - self.wall_s) / self.wall_s

    @property
    def unexplained(self) -> float:
        """Share of the wall time that belongs to no phase."""
        return self.unexplained_s / self.wall_s

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.process}: phases {self.phases_s:.4f} s, wall "
            f"{self.wall_s:.4f} s, {self.error * 100:.2f} % off"
        )


def rows_of(steps: Iterable[StepFacts]) -> list[ProcessInStep]:
    """Every process in every step."""
    return [
        ProcessInStep(
            step=facts.step,
            process=process,
            phases_s=facts.accounted_s(process),
            unexplained_s=row.get(UNEXPLAINED, 0.0),
            wall_s=facts.wall_s,
        )
        for facts in steps
        for process, row in facts.processes.items()
    ]


def sums(rows: Sequence[ProcessInStep], bound: float) -> tuple[list[str], bool]:
    """The report on sums, those beyond the bound first, and whether all are within it."""
    worst = sorted(rows, key=lambda row: row.error, reverse=True)
    beyond = [row for row in worst if row.error > bound]
    median = statistics.median(row.error for row in rows)
    return [
        *map(str, beyond[:WORST]),
        f"sums: {len({row.step for row in rows})} steps, {len(rows)} rows of a process in a step: "
        f"median {median * 100:.3f} % off, worst {worst[0].error * 100:.2f} %, "
        f"{len(beyond)} beyond {bound * 100:g} %",
    ], not beyond


def shares(rows: Sequence[ProcessInStep], bound: float) -> tuple[list[str], bool]:
    """The report on `unexplained`, one line a process, and whether all medians are within."""
    lines, within = [], True
    for process in dict.fromkeys(row.process for row in rows):
        mine = [row for row in rows if row.process == process]
        median = statistics.median(row.unexplained for row in mine)
        worst = max(mine, key=lambda row: row.unexplained)
        beyond = sum(row.unexplained > bound for row in mine)
        within = within and median <= bound
        lines.append(
            f"unexplained of {process}: median {median * 100:.2f} %, worst "
            f"{worst.unexplained * 100:.2f} % in step {worst.step}, {beyond} of {len(mine)} steps "
            f"beyond {bound * 100:g} %"
        )
    return lines, within


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        rows = rows_of(RunLog(given.run).refresh().new_steps)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not rows:
        print(f"error: {given.run} has no closed step with metrics", file=sys.stderr)
        return 2
    of_sums, adds_up = sums(rows, given.bound)
    of_shares, explains = shares(rows, given.unexplained)
    print("\n".join([*of_sums, *of_shares]))
    return 0 if adds_up and explains else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m diagnosis.ledger_report",
        description="Whether the phases of every process add up to the wall time of every step, "
        "and how much of it no phase explains.",
        epilog="exit codes: 0 within both bounds, 1 not, 2 nothing to check",
    )
    parser.add_argument("--run", required=True, type=pathlib.Path, metavar="DIR")
    for name, bound, meaning in (
        ("--bound", BOUND, "how far a sum may be off in any step"),
        ("--unexplained", UNEXPLAINED_BOUND, "how much a process may leave in the median step"),
    ):
        parser.add_argument(
            name,
            type=_share,
            default=bound,
            help=f"{meaning}, as a share of the wall time (default: %(default)g)",
        )
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share of 0 to 1, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
