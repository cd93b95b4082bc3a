"""The command line of a run: train, or only print or check the configuration."""

import argparse
import datetime
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from driver.config import load_config as settings
from driver.config import resume_identity as identity
from driver.config.paths import check_folder, clear_folder, locate, lock_folder, output_folder
from driver.config.presets import PRESETS, explain
from driver.config.ray_environment import set_environment
from driver.config.run_config import RunConfig
from driver.errors import RunError
from driver.signals import Interrupted
from services.process.terminal_text import unfiltered_stdout

if TYPE_CHECKING:
    from driver.config.prepare import Prepared

DEFAULT_CONFIG = "deploy/runs/demo_cpu.yaml"

_EPILOG = """\
examples:
  python -m driver                                      train the embedded demo model on the CPU
  python -m driver --config run.yaml --dry-run          check everything, touch no device
  python -m driver --config run.yaml --set run.steps=20 --set data.train.source=mine.jsonl
  python -m driver --config run.yaml --resume           go on from the newest checkpoint
  ray job submit --working-dir . -- python -m driver --config run.yaml

exit codes: 0 finished, 1 failed, 2 bad configuration, 3 resources not met,
4 nothing trained (where no completion could be scored, after 5 steps),
130 and 143 ended by SIGINT and SIGTERM with a checkpoint written
"""


class BadVariable(RunError):
    """A variable of the shell has a value that cannot be read."""

    exit_code = 2


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m driver`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver",
        description="Trains a language model with GRPO on a Ray cluster, or on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file of the run (default: {DEFAULT_CONFIG}, the demo)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one key; may be repeated, the last one for a key counts",
    )
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="objective of a published method in place of the file's `algorithm`: "
        f"{', '.join(PRESETS)} (docs/objectives.md)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint in run.output_dir",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and end"
    )
    only.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration, files, tokenizer, prompts, rewards and sizes, and end",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; a user's mistake is one message without a traceback."""
    given = parser().parse_args(arguments)
    overrides = [*given.overrides, *(["run.resume=true"] if given.resume else [])]
    try:
        path = given.config or DEFAULT_CONFIG
        config = locate(settings.load(path, overrides, given.preset))
        if given.print_config:
            _print_config(settings.dump(config))
            return 0
        _say_chosen(path, given)
        folder = output_folder(config.run)
        automatic = config.run.resume == "auto"
        if automatic:
            config = identity.resolved(config, folder)
        resume = bool(config.run.resume)
        check_folder(folder, resume=resume)
        prepared = _prepare(config, identity.kept_moment(folder) if resume else None)
        print(prepared.text, flush=True)
        marks = identity.identity_of(
            config,
            prepared.model,
            prepared.data,
            prepared.order,
            prepared.teacher and prepared.teacher.digest,
            prepared.base_digest,
        )
        if resume:
            try:
                unknown = identity.check_identity(folder, marks, steps=config.run.steps)
            except identity.AlreadyFinished as finished:
                if not automatic:
                    raise
                print(f"nothing to do: {finished}")
                return 0
            if unknown:
                print(
                    f"note: this run did not record its {', '.join(unknown)} when it started, so "
                    "these were not compared; the next resume compares them with those of now"
                )
        if given.dry_run:
            print("this run can start; devices and free resources of the cluster were not checked")
            return 0
        lock = lock_folder(folder)  # until this process ends
        check_folder(folder, resume=resume)
        clear_folder(folder, resume=resume)
        # On a resume, too: a run of an older program has no moment, nor all digests.
        identity.write_identity(folder, marks, prepared.moment)
        for change in identity.write_settings(folder, settings.dump(config), resume=resume):
            print(f"resumed with another {change}", flush=True)
        # Imported late: nothing above needs Ray, and it reads its token when it is imported.
        set_environment(os.environ, folder)
        from driver.run import run

        run(config, folder, prepared)
        lock.close()
        return 0
    except RunError as error:
        what = "" if isinstance(error, Interrupted) else "error: "
        print(f"{what}{error}", file=sys.stderr, flush=True)
        return error.exit_code


def _say_chosen(path: str, given: argparse.Namespace) -> None:
    """Prints what the arguments stand for, where that is not what a file says."""
    if given.config is None:
        print(f"note: no --config is given, so that this is the demo, {path}", flush=True)
    replaced = settings.read_section(path, "algorithm") if given.preset else {}
    print(explain(given.preset, replaced), end="", flush=True)


def _prepare(config: RunConfig, moment: datetime.datetime | None) -> "Prepared":
    """As `prepare`, which is imported late: printing a configuration needs none of it.

    Raises:
        BadVariable: if JAX cannot be imported with the variables of this shell.
        ConfigError: as `prepare` does.
    """
    try:
        from driver.config.prepare import prepare
    except ValueError as error:  # JAX reads its variables as it is imported
        if "JAX" not in str(error).upper():
            raise
        raise BadVariable(f"{error}: correct or unset the variable of this shell") from error
    return prepare(config, moment)


def _print_config(text: str) -> None:
    """Prints YAML; unless a terminal shows it, as `--config` reads it: unchanged and in UTF-8."""
    if sys.stdout.isatty():
        sys.stdout.write(text)
        return
    stream = unfiltered_stdout()
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8")
    stream.write(text)
