"""The command `python -m driver.plan`: what a run needs of chips that are not here.

Nothing is executed: the compiler of the chip says what fits. `--dry-run` checks a configuration by
arithmetic and without the compiler.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT
from services.process.whole_file import check_writable, write_whole

_EPILOG = """\
examples:
  python -m driver.plan --config run.yaml --topology v6e:2x4
  python -m driver.plan --config run.yaml --topology v5p:2x2x1 --set learner.lora.rank=16
  python -m driver.plan --config run.yaml --topology v6e:2x4 --search --json plan.json
  python -m driver.plan --config deploy/runs/demo_cpu.yaml --topology cpu

exit codes: 0 it fits, 1 it does not fit or compile, 2 bad arguments or configuration
"""
STDOUT = "-"


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Returns the exit code; a user's mistake is one message without a traceback."""
    given = parser().parse_args(arguments)
    # Before jax is imported, whose libtpu reads these when it starts.
    os.environ.update(LIBTPU_ENVIRONMENT)
    from driver.config.load_config import ConfigError
    from driver.config.plan import checked

    quiet = given.json == STDOUT
    console = console or Console(stderr=quiet)
    try:
        if given.json is not None and not quiet:
            checked(check_writable, pathlib.Path(given.json), "--json")
        return _plan(given, console)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _plan(given: argparse.Namespace, console: Console) -> int:
    # Imported late: they import jax.
    from driver.chip_plan.advice import nearest_that_fits
    from driver.chip_plan.fingerprint import fingerprint
    from driver.chip_plan.report import as_json, make_plan, print_plan
    from driver.chip_plan.run_shape import ROLES, PlanRequest
    from driver.chip_plan.search import LargestSearch, settings_of
    from driver.chip_plan.topology import parse_topology

    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    request = PlanRequest(
        path=given.config,
        overrides=tuple(given.overrides),
        topology=parse_topology(given.topology, given.usable_gib),
        model_config=given.model_config,
        layers=given.layers,
    )
    shape = request.shape()
    roles = tuple(given.role or ROLES)
    say(
        f"{given.config} on {given.topology}: {shape.model.model_type}, "
        f"{shape.model.num_layers} layers, {shape.plan.parameters:,} parameters"
    )
    programs = []
    for program in shape.compile_programs(roles):
        programs.append(program)
        say(f"compiled {program.role} {program.name} in {program.compile_s:.0f} s")
    plan = make_plan(command_of(given), request, shape, programs)
    words, searched, search = plan.words, (), LargestSearch(request, say)
    if not plan.fits:
        words += tuple(nearest_that_fits(request, shape, programs, search))
    if given.search:
        wanted = [one for one in settings_of(shape) if set(one.roles) <= set(roles)]
        searched = tuple(search.largest_fitting(one, programs) for one in wanted)
    plan = dataclasses.replace(plan, words=words, searched=searched)
    print_plan(plan, console)
    if given.json:
        found = as_json(plan) | {"fingerprint": fingerprint(request, shape)}
        text = json.dumps(found, indent=1, allow_nan=False) + "\n"
        if given.json == STDOUT:
            sys.stdout.write(text)
        else:
            write_whole(pathlib.Path(given.json), text)
    return 0 if plan.fits else 1


def command_of(given: argparse.Namespace) -> str:
    """The command with the same arguments, but for --json, as a shell takes it."""
    words = ["python", "-m", "driver.plan", "--config", given.config, "--topology", given.topology]
    for override in given.overrides:
        words += ["--set", override]
    for role in given.role or ():
        words += ["--role", role]
    for name in ("model_config", "layers", "usable_gib"):
        if (value := getattr(given, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words + ["--search"] * given.search)


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m driver.plan`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.plan",
        description="Compiles the programs of a run for chips that are not here, and says what "
        "they need and whether they fit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", required=True, help="YAML file of the run")
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one key, as python -m driver takes it; may be repeated",
    )
    add(
        "--topology",
        metavar="KIND:SHAPE",
        required=True,
        help="chips of the run: v6e:2x4, v6e:4x4, v5e:2x4, v5p:2x2x1, .. or cpu",
    )
    add(
        "--search",
        action="store_true",
        help="also find the largest micro-batch, slots and context that fit (compiles more)",
    )
    add("--json", metavar="FILE", help="write the plan there as well; - for standard output")
    add("--role", action="append", choices=("learner", "worker"), help="this role alone")
    add("--model-config", metavar="FILE", help="config.json that stands for the model's")
    add("--layers", type=int, metavar="N", help="cut the model to its first N layers")
    add(
        "--usable-gib",
        type=float,
        metavar="GIB",
        help="memory of a chip that programs may use, in place of what its compiler takes",
    )
    return parser
