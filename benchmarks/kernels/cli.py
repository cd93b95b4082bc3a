"""Times the loss over a vocabulary, or attention, value and gradient, and measures its error.

    python -m kernels.bench logits --compare log_softmax,xla,pallas --json logits.json
    python -m kernels.bench lm_head --compare log_softmax,auto:fast,auto:lean
    python -m kernels.bench lm_head --impl auto --active-fraction 0.25
    python -m kernels.bench probe
    python -m kernels.bench attention --time 4096 --segments 8 --compare reference,auto

The sizes default to those of a large model on one accelerator; give small ones on a CPU: each bench
compiles and makes its data first, which takes minutes there at the default sizes. Errors are
relative to float64, over a subset of the tokens. Peaks of the allocator are those of the
process: with --compare only the first competitor's are its own, while the compiler's `temp_bytes`
belong to each. Exits with 1 when a result is not finite, with 2 when the arguments are wrong.
"""

import argparse
import dataclasses
import functools
import importlib.util
import sys
from typing import Any, cast

import jax

from benchmarks.kernels import attention
from benchmarks.kernels.case import (
    DTYPES,
    IMPLS,
    LOG_SOFTMAX,
    MODES,
    Case,
    CompetitorSpec,
    DoesNotFit,
    parse_competitor,
)
from benchmarks.kernels.run import Effort, measure
from benchmarks.report_file import (
    INTERPRETED,
    STDOUT,
    aligned,
    check_report_file,
    json_values,
    write_report,
)
from kernels import choose
from kernels.linear_objective.schedule import SCHEDULES

SIZES = {
    "logits": {"batch": 1, "time": 4096, "vocab": 151643, "entropy_coef": 0.0},
    "lm_head": {"batch": 1, "time": 8192, "hidden": 4096, "vocab": 151936, "entropy_coef": 0.0},
    "probe": {"batch": 8, "time": 1024, "vocab": 16384, "entropy_coef": 0.01},
}
HELP = {
    "logits": "the loss from given logits",
    "lm_head": "the loss from hidden states and the head, logits never given",
    "probe": "`logits` at the size of a small probe, with an entropy bonus",
}
SIZE_HELP = {
    "batch": "sequences",
    "time": "tokens of each sequence",
    "hidden": "width of the hidden states",
    "vocab": "columns of the logits, or rows of the head",
}
WANDB_MODES = ("online", "offline", "disabled")
OF_THE_HEAD = ("hidden", "schedule", "chunk-tokens", "active-fraction")
SCHEDULE = SCHEDULES[0]
"""Schedule of a competitor that names none."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.what == "attention":
        return attention.run(arguments)
    try:
        case, specs, effort = read_arguments(arguments)
    except ValueError as error:
        return _refuse(error)
    try:
        found = measure(
            case,
            specs,
            jax.devices()[0],
            effort=effort,
            progress=lambda line: print(line, file=sys.stderr),
        )
    except DoesNotFit as error:
        return _refuse(error)
    document = json_values({"what": arguments.what, **found})
    _report(document, arguments)
    broken = [run["name"] for run in document["runs"] if not is_finite(run)]
    if broken:
        print(f"bench: not finite: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def _refuse(error: ValueError) -> int:
    print(f"bench: {error}", file=sys.stderr)
    return 2


def _report(document: dict[str, Any], arguments: argparse.Namespace) -> None:
    write_report(document, arguments.json, table(document))
    if _wants_wandb(arguments):
        _log_to_wandb(document, arguments.wandb_project, arguments.wandb_mode)


def read_arguments(arguments: argparse.Namespace) -> tuple[Case, list[CompetitorSpec], Effort]:
    """Problem, competitors and rounds that a command line asks for.

    Raises:
        ValueError: naming the value, the rule and what to write instead.
    """
    given: dict[str, Any] = vars(arguments)
    fields = {field.name: given.get(field.name) for field in dataclasses.fields(Case)}
    case = Case(**cast(dict[str, Any], fields))
    effort = Effort(
        iters=arguments.iters, warmup=arguments.warmup, check_tokens=arguments.check_tokens
    )
    texts = [arguments.impl] if arguments.compare is None else arguments.compare.split(",")
    if arguments.schedule is not None and not any(map(_takes_schedule, texts)):
        raise ValueError(
            f"--schedule {arguments.schedule} is for none of {', '.join(texts)}: "
            f"{choose.REFERENCE} and {LOG_SOFTMAX} have no schedules, IMPL:SCHEDULE has its own"
        )
    schedule = None if case.hidden is None else arguments.schedule or SCHEDULE
    options = {"schedule": schedule, "chunk_tokens": arguments.chunk_tokens}
    platform = jax.devices()[0].platform
    specs = [parse_competitor(text, platform=platform, **options) for text in texts]
    if len(set(specs)) < len(specs):
        raise ValueError(f"--compare names an implementation twice: {arguments.compare!r}")
    if _wants_wandb(arguments) and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb-project needs W&B: pip install '.[wandb]'")
    check_report_file(arguments.json)
    return case, specs, effort


def _takes_schedule(text: str) -> bool:
    return ":" not in text and text.strip() not in (choose.REFERENCE, LOG_SOFTMAX)


def is_finite(run: dict[str, Any]) -> bool:
    """Whether nothing in the loss and the errors was NaN or infinite, which became null."""
    errors = run["errors"]
    values = [run["loss"]]
    for each in errors.values():
        values += list(each.values()) if isinstance(each, dict) else [each]
    return all(value is not None for value in values)


def table(document: dict[str, Any]) -> list[str]:
    """The document for a person, as lines."""
    runs = document["runs"]
    is_head = runs[0]["case"]["hidden"] is not None
    gradients = _HEAD_GRADIENTS if is_head else _LOGITS_GRADIENTS
    titles = ["", *_TIMES.values(), "temp GB", *["chunk tokens"] * is_head, "loss error"]
    rows = [titles + list(gradients.values())]
    for run in runs:
        errors = run["errors"]
        chunk = run["chunk_tokens"]
        rows.append(
            [
                run["name"] + "*" * _is_interpreted(run),
                *(_number(run[name], ".3f") for name in _TIMES),
                _number(run["compiler"]["temp_bytes"] / 1e9, ".3f"),
                *[_number(chunk, "d")] * is_head,
                *(
                    _number(errors.get(name, {}).get("rel_l2"), ".1e")
                    for name in ("loss", *gradients)
                ),
            ]
        )
    shares = runs[0]["clip"]
    return [
        f"ratio below the clip {shares['ratio_low']:.1%}, above {shares['ratio_high']:.1%}, "
        f"held by it {shares['clipped']:.1%}",
        *aligned(rows),
        *(f"{name}: {ratio:.3f}" for name, ratio in document["ratios"].items()),
        *[f"* {INTERPRETED}"] * any(map(_is_interpreted, runs)),
    ]


_TIMES = {"p50_ms": "p50 ms", "p90_ms": "p90 ms", "avg_step_ms": "avg ms"}
_LOGITS_GRADIENTS = {"logits_grad": "logits grad error"}
_HEAD_GRADIENTS = {"hidden_grad": "hidden grad error", "head_grad": "head grad error"}


def _is_interpreted(run: dict[str, Any]) -> bool:
    return run["kernel"] == choose.PALLAS_INTERPRET


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else f"{value:{spec}}"


def _wants_wandb(arguments: argparse.Namespace) -> bool:
    return arguments.wandb_project is not None and arguments.wandb_mode != "disabled"


def _log_to_wandb(document: dict[str, Any], project: str, mode: str) -> None:
    """One W&B run for each competitor."""
    import wandb

    for measured in document["runs"]:
        config = {"what": document["what"], **measured["case"], "impl": measured["impl"]}
        settings: dict[str, Any] = {"project": project, "mode": mode, "config": config}
        with wandb.init(name=measured["name"], **settings) as run:
            run.summary.update(measured)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for what, sizes in SIZES.items():
        flags = " ".join(f"--{name} {sizes[name]}" for name in SIZE_HELP if name in sizes)
        command = commands.add_parser(
            what,
            help=f"{HELP[what]}; default {flags}",
            description=f"Times {HELP[what]}. It compiles and makes its data first: minutes at the "
            "default sizes on a CPU.",
        )
        _add_competitors(command, is_head="hidden" in sizes)
        _add_problem(command, sizes)
        _add_reports(command)
    what = "attention over rows that pack several sequences"
    command = commands.add_parser("attention", help=what, description=f"Times {what}.")
    attention.add_arguments(command)
    _add_json(command)
    return parser


def _add(command: argparse.ArgumentParser, flag: str, what: str, **options: Any) -> None:
    default = " (default: %(default)s)" if options.get("default") is not None else ""
    command.add_argument(flag, help=what + default, **options)


def _add_competitors(command: argparse.ArgumentParser, *, is_head: bool) -> None:
    asked = command.add_mutually_exclusive_group()
    asked.add_argument(
        "--impl", default="auto", help=f"one of {', '.join(IMPLS)} (default: %(default)s)"
    )
    asked.add_argument(
        "--compare",
        metavar="IMPL[,IMPL...]",
        help="several in turn; the first is what ratios refer to"
        + ("; IMPL may be IMPL:SCHEDULE" if is_head else ""),
    )
    if not is_head:
        for name in OF_THE_HEAD:
            command.add_argument(f"--{name}", type=_refuse_of_the_head, help=argparse.SUPPRESS)
        return
    _add(
        command,
        "--schedule",
        "of those that name none: fast keeps the logits of a chunk until its gradient, lean "
        f"computes them twice (default: {SCHEDULE})",
        choices=SCHEDULES,
    )
    _add(
        command,
        "--chunk-tokens",
        "bound on the tokens of a chunk (default: what suits the implementation)",
        type=int,
    )
    _add(
        command,
        "--active-fraction",
        "mask all but this share of the tokens, and time the valid tokens alone as well",
        type=float,
    )


def _refuse_of_the_head(text: str) -> None:
    raise argparse.ArgumentTypeError(f"it belongs to lm_head: logits are given here; got {text!r}")


def _add_problem(command: argparse.ArgumentParser, sizes: dict[str, Any]) -> None:
    for name, what in SIZE_HELP.items():
        if name in sizes:
            _add(command, f"--{name}", what, type=int, default=sizes[name])
    _add(command, "--dtype", "of the inputs", choices=DTYPES, default="bfloat16")
    _add(
        command,
        "--mode",
        "on_policy has every ratio at 1, off_policy has them on both sides of the clip",
        choices=MODES,
        default="off_policy",
    )
    number = functools.partial(_add, command, type=float)
    number("--temperature", "that logits are divided by", default=1.0)
    number("--clip-low", "the ratio is held above 1 minus this", default=0.2)
    number("--clip-high", "the ratio is held below 1 plus this", default=0.2)
    number("--entropy-coef", "weight of the entropy bonus", default=sizes["entropy_coef"])
    number(
        "--behavior-noise",
        "standard deviation of behaviour minus policy logprob, off policy; nats",
        default=0.3,
    )
    _add(command, "--seed", "of the random inputs", type=int, default=0)


def _add_reports(command: argparse.ArgumentParser) -> None:
    _add(command, "--iters", "timed rounds", type=int, default=20)
    _add(command, "--warmup", "rounds before them", type=int, default=3)
    _add(
        command,
        "--check-tokens",
        "tokens that are compared with float64",
        type=int,
        default=64,
    )
    _add_json(command)
    _add(command, "--wandb-project", "log every competitor as a W&B run")
    _add(
        command,
        "--wandb-mode",
        "of the runs of --wandb-project; offline keeps them on disk",
        choices=WANDB_MODES,
        default="online",
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    _add(
        command,
        "--json",
        "write the measurements there; without FILE to stdout, instead of the table",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
    )
