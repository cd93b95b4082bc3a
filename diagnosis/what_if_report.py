"""Compares the predictions of the What-if view with the steps of a finished run.

    python -m diagnosis.what_if_report --run DIR

Exit code 0, or 2 if the folder has nothing to predict from.
"""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Sequence

from diagnosis.judgement.what_if import WhatIf
from diagnosis.records.run_log import RunLog

LAST = 20
"""Predictions of single steps that are shown."""


def report(what_if: WhatIf) -> list[str]:
    """The report; its last two lines are the summary."""
    lines = ["one step ahead: step, predicted, took, off"]
    lines += [
        f"{p.step:7d} {p.predicted:9.3f} s {p.actual:9.3f} s {p.error * 100:+7.1f} %"
        for p in list(what_if.past)[-LAST:]
    ]
    lines.append(
        "another number of workers: first step, from, to, predicted, took, off; "
        "update before, after"
    )
    lines += [
        f"{c.step:7d} {c.before:3d} {c.after:3d} {c.predicted:9.3f} s {c.actual:9.3f} s "
        f"{c.error * 100:+7.1f} %   {c.update_before_s:9.3f} s {c.update_after_s:9.3f} s"
        for c in what_if.changes
    ]
    lines.append("now: " + "; ".join(_option(one) for one in what_if.options()))
    lines.append(_sum_up("steps one step ahead", what_if.errors))
    lines.append(_sum_up("changes", [abs(change.error) for change in what_if.changes]))
    return lines


def _option(one) -> str:
    return f"{one['title']} {one['step_s']:.3f} s ({one['sure']}: {one['note']})"


def _sum_up(what: str, errors: Sequence[float]) -> str:
    if not errors:
        return f"{what}: none"
    return f"{what}: {len(errors)} predicted, median error {statistics.median(errors) * 100:.1f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m diagnosis.what_if_report",
        description="Compares the predictions of the What-if view with the steps of a run.",
    )
    parser.add_argument("--run", required=True, type=pathlib.Path, metavar="DIR")
    given = parser.parse_args(arguments)
    try:
        log = RunLog(given.run)
        steps = log.refresh().new_steps
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    what_if = WhatIf(log.settings)
    for facts in steps:
        what_if.add_step(facts)
    if what_if.json() is None:
        print(f"error: {given.run} has no step that trained without compiling", file=sys.stderr)
        return 2
    print("\n".join(report(what_if)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
