"""`python -m driver.verify_resume DIR`: checks that the run in DIR resumes bit for bit.

Reads a checkpoint back, makes its resume certificate again, takes the step that the run took after
it once more in this process, and compares the digest of the weights with the one issued then.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from rich.table import Table

from driver.reports.status import ExitCode
from driver.terminal.harmless import harmless_console
from learner.durable.frames import DamagedFile
from learner.resume_check import NothingToCheck, RecordedStep, RepeatedStep, find_step, repeat_step
from models.platform import WrongPlatform
from services.process.terminal_text import protect_terminal

SHOWN = 16
"""Characters of a hash that the table shows."""


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m driver.verify_resume`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.verify_resume",
        description="Takes the step after a checkpoint once more and compares the weights.",
        epilog="exit codes: 0 equal, 1 something differs, 2 there is nothing to verify",
    )
    parser.add_argument("folder", metavar="DIR", help="output folder of a run")
    parser.add_argument(
        "--step",
        type=int,
        help="of the checkpoint (default: the newest that has a recorded step after it)",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="the model that the run started from (default: where it was then)",
    )
    return parser


def rows(recorded: RecordedStep, result: RepeatedStep) -> list[tuple[str, str, str, bool]]:
    """What was compared: name, value then, value now, and whether they are equal."""
    now = result.certificate.plain()
    stored = result.stored or {}
    parts = [(f"certificate: {name}", stored.get(name, "none"), now[name]) for name in now]
    made = f"weights of version {recorded.policy_version + 1}"
    return [
        (name, then, value, then == value)
        for name, then, value in [*parts, (made, recorded.digest, result.digest)]
    ]


def table(compared: Sequence[tuple[str, str, str, bool]]) -> Table:
    """One line for each hash."""
    shown = Table("what", "then", "now", "equal")
    for name, then, now, equal in compared:
        shown.add_row(name, then[:SHOWN], now[:SHOWN], "yes" if equal else "NO")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one table; returns the exit code."""
    given = parser().parse_args(arguments)
    folder = pathlib.Path(given.folder)
    console = harmless_console()
    try:
        recorded = find_step(folder, given.step)
        console.print(
            f"checkpoint of step {recorded.step}, policy version {recorded.policy_version}; the "
            f"next step trained on {len(recorded.groups)} groups"
        )
        result = repeat_step(folder, recorded, given.model)
    except (NothingToCheck, DamagedFile, WrongPlatform, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    compared = rows(recorded, result)
    console.print(table(compared))
    different = [name for name, _, _, equal in compared if not equal]
    if not different:
        print(f"verify_resume: step {recorded.step + 1} made again, weights equal")
        return ExitCode.FINISHED
    print(
        f"verify_resume: step {recorded.step + 1} made again, not equal: {', '.join(different)} "
        f"(trained on {recorded.devices} {recorded.platform} devices then, on {result.devices} now)"
    )
    return ExitCode.FAILED


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
