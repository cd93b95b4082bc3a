"""Trains twice, the second time with faults, and compares the two runs; or soaks a run.

    python -m deploy.chaos [--short] [--seed 0] [--mode sync|async] [--faults 27]
    python -m deploy.chaos soak [--minutes 10]

docs/chaos.md lists the faults, the checks and how to read the report. Exit code: 0 if every check
passed, 1 if one failed, 130 after Ctrl-C.
"""

import argparse
import contextlib
import math
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.chaos import campaign, run_checks, soak
from benchmarks.chaos.schedule import SHORT, FaultKind, draw_faults


class Form(NamedTuple):
    """How long a campaign is, unless the command says otherwise."""

    steps: int
    faults: int
    every_steps: int
    """Between two checkpoints."""
    kinds: tuple[FaultKind, ...]


WHOLE_FORM = Form(81, 27, 5, tuple(FaultKind))
SHORT_FORM = Form(14, 4, 4, SHORT)


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m deploy.chaos`."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.chaos",
        description="Trains a tiny model twice, the second time with faults, and compares.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--steps", type=int, help=f"steps of both runs (default: {WHOLE_FORM.steps})"
    )
    parser.add_argument(
        "--faults", type=int, help=f"faults in the second run (default: {WHOLE_FORM.faults})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument("--mode", choices=sorted(campaign.STALENESS), default="sync")
    parser.add_argument(
        "--short",
        dest="form",
        action="store_const",
        const=SHORT_FORM,
        default=WHOLE_FORM,
        help=f"{SHORT_FORM.faults} faults in {SHORT_FORM.steps} steps",
    )
    parser.add_argument(
        "--only",
        type=_kinds,
        metavar="KIND,...",
        help=f"draw only from these kinds: {', '.join(kind.name.lower() for kind in FaultKind)}",
    )
    parser.add_argument(
        "--undisturbed",
        type=pathlib.Path,
        metavar="DIR",
        help="an earlier undisturbed run of the same steps and mode (default: one is made first)",
    )
    parser.add_argument("--folder", type=pathlib.Path, help="kept afterwards; default: temporary")
    parser.add_argument(
        "--patience",
        type=_factor,
        default=1.0,
        metavar="FACTOR",
        help="multiply every bound of time, on a machine that does other work (default: 1)",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the faults of this seed and exit"
    )
    commands = parser.add_subparsers(dest="command")
    soaking = commands.add_parser("soak", help="kills and adds workers, and looks for leaks")
    soaking.add_argument("--minutes", type=float, default=10.0)
    soaking.add_argument("--folder", type=pathlib.Path, help="kept afterwards; default: temporary")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if given.command == "soak":
            return _soak(given)
        return _chaos(given)
    except KeyboardInterrupt:
        return 130


def _chaos(given: argparse.Namespace) -> int:
    started = time.monotonic()
    form: Form = given.form
    every_steps, steps = form.every_steps, given.steps or form.steps
    try:
        faults = draw_faults(
            given.seed,
            given.faults or form.faults,
            steps=steps,
            every_steps=every_steps,
            kinds=given.only or form.kinds,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.list:
        for fault in faults:
            print(f"{fault.number:2}  step {fault.step:3}  {fault.kind.value}")
        return 0
    folder = _folder(given)
    planned = campaign.Campaign(
        steps=steps,
        every_steps=every_steps,
        mode=given.mode,
        faults=faults,
        patience=given.patience,
    )
    outcome = campaign.run_campaign(planned, folder, _say, undisturbed=given.undisturbed)
    _end(outcome.problems, folder, kept=given.folder is not None)
    _say(
        run_checks.last_line(
            faults=outcome.hit,
            lost=outcome.lost,
            duplicated=outcome.duplicated,
            parameters_equal=outcome.parameters_equal,
            seconds=time.monotonic() - started,
        )
    )
    return 0 if outcome.passed else 1


def _soak(given: argparse.Namespace) -> int:
    if given.minutes < soak.LEAST_MINUTES:
        least = f"{soak.LEAST_MINUTES:g}"
        print(
            f"error: --minutes {given.minutes:g} is too short: use at least {least}",
            file=sys.stderr,
        )
        return 2
    folder = _folder(given)
    report = soak.run_soak(given.minutes * 60, folder, _say)
    _end(report.problems, folder, kept=given.folder is not None)
    _say(report.last_line)
    return 1 if report.problems else 0


def _folder(given: argparse.Namespace) -> pathlib.Path:
    folder = given.folder or pathlib.Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"error: --folder {folder} must be empty")
    return folder


def _end(problems: Sequence[str], folder: pathlib.Path, *, kept: bool) -> None:
    for problem in problems:
        _say(f"FAILED: {problem}")
    if problems or kept:
        _say(f"runs, logs of drivers and actors: {folder}")
    else:
        campaign.clean(folder)


def _kinds(text: str) -> tuple[FaultKind, ...]:
    try:
        return tuple(FaultKind[name.strip().upper()] for name in text.split(","))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"unknown kind {error}; see --help") from error


def _factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no factor: give a number of at least 1")


def _interrupt(signum: int, frame) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
