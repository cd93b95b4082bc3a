"""The command line of supervised training: train, or only print or check the configuration."""

import argparse
import errno
import os
import pathlib
import sys
from collections.abc import Sequence

from driver.config import load_config as settings
from driver.config import resume_identity as identity
from driver.config.paths import (
    check_folder,
    clear_folder,
    locate_inputs,
    lock_folder,
    output_folder,
)
from driver.config.shell_switches import FIXED, overridden
from driver.errors import RunError
from driver.sft.sft_config import SftConfig
from driver.signals import Interrupted
from services.process.terminal_text import protect_terminal

_EPILOG = """\
examples:
  python -m learner.sft --config sft.yaml --dry-run       check everything, touch no device
  python -m learner.sft --config sft.yaml --set run.epochs=3 --set data.train.source=mine.jsonl
  python -m learner.sft --config sft.yaml --resume        go on from the newest checkpoint
  python -m driver --config run.yaml --set model.path=runs/sft/export

docs/sft.md describes records and configuration.

exit codes: 0 finished, 1 failed, 2 bad configuration, 3 devices not there,
4 all steps done but nothing trained, 130 and 143 ended by SIGINT and SIGTERM with a checkpoint
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m learner.sft`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m learner.sft",
        description="Trains a language model on given answers, in this process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of the training")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one key; may be repeated, the last one for a key counts",
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
        help="check configuration, files, tokenizer, records and sizes, and end",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; a user's mistake is one message without a traceback."""
    protect_terminal()
    given = parser().parse_args(arguments)
    overrides = [*given.overrides, *(["run.resume=true"] if given.resume else [])]
    try:
        config = locate_inputs(settings.load_as(SftConfig, given.config, overrides))
        if given.print_config:
            sys.stdout.write(settings.dump(config))
            return 0
        _train(config, dry_run=given.dry_run)
        return 0
    except RunError as error:
        what = "" if isinstance(error, Interrupted) else "error: "
        print(f"{what}{error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(
            f"error: no space left on the disk ({error.filename or 'of run.output_dir'}): free "
            "some, then go on with --resume",
            file=sys.stderr,
            flush=True,
        )
        return 1


def _train(config: SftConfig, *, dry_run: bool) -> None:
    """Plans, and trains unless only the plan is asked for; raises RunError."""
    folder = output_folder(config.run)
    resume = _resumes(config, folder)
    check_folder(folder, resume=resume)
    moment = identity.kept_moment(folder) if resume else None
    _use_own_switches()
    # Imported late: nothing above needs JAX, which reads its variables when it is imported.
    from driver.sft.sft_plan import KEPT, plan_training

    plan = plan_training(config, moment)
    print(plan.text, flush=True)
    if resume:
        identity.check_kept(folder, plan.marks, KEPT, {"shuffle": "True"})
    if dry_run:
        print("this training can start; devices were not checked")
        return
    lock = lock_folder(folder)  # until this process ends
    check_folder(folder, resume=resume)
    clear_folder(folder, resume=resume)
    if not resume:
        identity.write_identity(folder, plan.marks, plan.moment)
    for change in identity.write_settings(folder, settings.dump(config), resume=resume):
        print(f"resumed with another {change}", flush=True)
    from driver.sft.sft_run import run_training

    run_training(config, folder, plan, resume=resume)
    lock.close()


def _resumes(config: SftConfig, folder: pathlib.Path) -> bool:
    """Whether to go on with the training in the folder; `auto` does where there is one."""
    if config.run.resume == "auto":
        return (folder / identity.FILE).is_file()
    return bool(config.run.resume)


def _use_own_switches() -> None:
    """Has JAX compute with its own defaults, as every process of a run does."""
    if "jax" not in sys.modules:
        for note in overridden(os.environ):
            print(f"note: {note}", flush=True)
        os.environ.update(FIXED)
