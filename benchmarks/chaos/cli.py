"""Trains twice, the second time with faults, and compares the two runs; or soaks a run.

    python -m deploy.chaos [--short] [--seed 0] [--mode sync|async] [--only KIND,...]
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
from benchmarks.chaos.schedule import (
    IN_EPISODES,
    OF_COMPLETIONS,
    SHORT,
    FaultKind,
    draw_faults,
)


class Form(NamedTuple):
    """How long a campaign is, unless the command says otherwise."""

    steps: int
    faults: int
    every_steps: int
    """Between two checkpoints."""
    kinds: tuple[FaultKind, ...]
    episodes: bool
    """Of several turns, or completions of one."""


WHOLE_FORMS = (Form(81, 27, 5, OF_COMPLETIONS, False), Form(16, 5, 5, IN_EPISODES, True))
SHORT_FORMS = (Form(16, 6, 4, SHORT, True),)


def count_of(forms: Sequence[Form]) -> str:
    """Of faults and steps, in words."""
    return f"{sum(form.faults for form in forms)} faults in {sum(f.steps for f in forms)} steps"


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m deploy.chaos`."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.chaos",
        description="Trains a tiny model twice, the second time with faults, and compares.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, help="steps of each run (default: see --short)")
    parser.add_argument("--faults", type=int, help="faults in each run that is disturbed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument("--mode", choices=sorted(campaign.STALENESS), default="sync")
    parser.add_argument(
        "--short",
        dest="forms",
        action="store_const",
        const=SHORT_FORMS,
        default=WHOLE_FORMS,
        help=f"{count_of(SHORT_FORMS)} (default: {count_of(WHOLE_FORMS)})",
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
        help="an earlier undisturbed run of the same steps and mode, with --only (default: one is "
        "made first)",
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
    try:
        planned = _campaigns(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.list:
        for fault in (fault for one in planned for fault in one.faults):
            print(f"{fault.number:2}  step {fault.step:3}  {fault.kind.value}")
        return 0
    folder = _folder(given)
    outcomes = [
        campaign.run_campaign(one, folder / one.name, _say, undisturbed=given.undisturbed)
        for one in planned
    ]
    outcome = campaign.sum_of_outcomes(outcomes)
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


def _campaigns(given: argparse.Namespace) -> list[campaign.Campaign]:
    """What is to be run, one after the other.

    Raises:
        ValueError: if a run is too short for its faults, or what is of one campaign is given for
            two.
    """
    forms = _forms_of(given.forms, given.only) if given.only else given.forms
    of_one = ("undisturbed",) if given.only else ("undisturbed", "steps", "faults")
    for name in of_one:
        if getattr(given, name) and len(forms) > 1:
            raise ValueError(
                f"--{name} is of one campaign, and there are two, of completions and of episodes: "
                "name the kinds of one with --only"
            )
    planned = []
    for form in forms:
        steps = given.steps or form.steps
        faults = draw_faults(
            given.seed,
            given.faults or form.faults,
            steps=steps,
            every_steps=form.every_steps,
            kinds=form.kinds,
        )
        planned.append(
            campaign.Campaign(
                steps=steps,
                every_steps=form.every_steps,
                mode=given.mode,
                faults=faults,
                episodes=form.episodes,
                patience=given.patience,
            )
        )
    return planned


def _forms_of(forms: Sequence[Form], kinds: Sequence[FaultKind]) -> list[Form]:
    """The forms with these kinds of faults alone; each kind hits the runs that it is made for."""
    chosen = []
    for episodes in (False, True):
        fitting = tuple(kind for kind in kinds if (kind in IN_EPISODES) == episodes)
        like = next((form for form in forms if form.episodes == episodes), forms[0])
        if fitting:
            chosen.append(like._replace(kinds=fitting, episodes=episodes))
    return chosen


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
