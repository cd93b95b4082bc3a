"""Times the loss over a vocabulary, value and gradient, and says how exact it is.

    python -m kernels.bench logits --compare log_softmax,xla,pallas --json logits.json
    python -m kernels.bench lm_head --compare log_softmax,auto:fast,auto:lean
    python -m kernels.bench lm_head --impl auto --active-fraction 0.25
    python -m kernels.bench probe

The sizes default to those of a large model on one accelerator; give small ones on a CPU. Errors
are relative to float64, over a subset of the tokens. Peaks of the allocator are those of the
process: with --compare only the first competitor's are its own, while the compiler's `temp_bytes`
belong to each. Exits with 1 when a result is not finite, with 2 when the question is wrong.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
from typing import Any, cast

import jax

from kernels.bench.case import DTYPES, IMPLS, MODES, Case, DoesNotFit, Spec, parse_spec
from kernels.bench.measure import plain
from kernels.bench.run import Effort, measure
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
WANDB_MODES = ("online", "offline", "disabled")


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        case, specs, effort = question(arguments)
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
    document = plain({"what": arguments.what, **found})
    _report(document, arguments)
    broken = [run["name"] for run in document["runs"] if not is_finite(run)]
    if broken:
        print(f"bench: not finite: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def _refuse(error: ValueError) -> int:
    print(f"bench: {error}", file=sys.stderr)
    return 2


def _report(document: dict[str, Any], arguments: argparse.Namespace) -> None:
    text = json.dumps(document, indent=2, allow_nan=False)
    if arguments.json == "-":
        print(text)
    else:
        print("\n".join(table(document)))
        if arguments.json is not None:
            pathlib.Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    if _wants_wandb(arguments):
        _log_to_wandb(document, arguments.wandb_project, arguments.wandb_mode)


def question(arguments: argparse.Namespace) -> tuple[Case, list[Spec], Effort]:
    """What is to be measured.

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
    options = {name: given.get(name) for name in ("schedule", "chunk_tokens")}
    platform = jax.devices()[0].platform
    specs = [parse_spec(text, platform=platform, **options) for text in texts]
    if len(set(specs)) < len(specs):
        raise ValueError(f"--compare names an implementation twice: {arguments.compare!r}")
    if _wants_wandb(arguments) and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb-project needs W&B: pip install 'tandem[wandb]'")
    return case, specs, effort


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
    width = max(len(run["name"]) for run in runs)
    columns = "  p50 ms   p90 ms   avg ms   temp GB  loss error  gradient error"
    shares = runs[0]["clip"]
    lines = [
        f"ratio below the clip {shares['ratio_low']:.1%}, above {shares['ratio_high']:.1%}, "
        f"held by it {shares['clipped']:.1%}",
        f"{'':{width}}{columns}",
    ]
    for run in runs:
        times = "".join(f"{_number(run[name], '8.3f')} " for name in _TIMES)
        errors = run["errors"]
        gradients = [errors[name]["rel_l2"] for name in _GRADIENTS if name in errors]
        lines.append(
            f"{run['name']:{width}}{times} {run['compiler']['temp_bytes'] / 1e9:8.3f}  "
            f"{_number(errors.get('loss', {}).get('rel_l2'), '10.1e')}  "
            + " ".join(_number(value, "8.1e") for value in gradients)
        )
    lines += [f"{name}: {ratio:.3f}" for name, ratio in document["ratios"].items()]
    return lines


_TIMES = ("p50_ms", "p90_ms", "avg_step_ms")
_GRADIENTS = ("logits_grad", "hidden_grad", "head_grad")


def _number(value: float | None, spec: str) -> str:
    width = int(spec.split(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:{spec}}"


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
        command = commands.add_parser(
            what, help=HELP[what], formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        _add_competitors(command, is_head=what == "lm_head")
        _add_problem(command, sizes)
        _add_reports(command)
    return parser


def _add_competitors(command: argparse.ArgumentParser, *, is_head: bool) -> None:
    asked = command.add_mutually_exclusive_group()
    asked.add_argument("--impl", default="auto", help=f"one of {', '.join(IMPLS)}")
    asked.add_argument(
        "--compare",
        metavar="IMPL[,IMPL...]",
        help="several in turn; the first is what ratios refer to"
        + ("; IMPL may be IMPL:SCHEDULE" if is_head else ""),
    )
    if is_head:
        command.add_argument("--schedule", choices=SCHEDULES, default="fast")
        command.add_argument("--chunk-tokens", type=int, help="bound on the tokens of a chunk")
        command.add_argument(
            "--active-fraction",
            type=float,
            help="mask all but this share of the tokens, and time the valid tokens alone as well",
        )


def _add_problem(command: argparse.ArgumentParser, sizes: dict[str, Any]) -> None:
    for name in ("batch", "time", "hidden", "vocab"):
        if name in sizes:
            command.add_argument(f"--{name}", type=int, default=sizes[name])
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    command.add_argument("--mode", choices=MODES, default="off_policy")
    command.add_argument("--temperature", type=float, default=1.0)
    command.add_argument("--clip-low", type=float, default=0.2)
    command.add_argument("--clip-high", type=float, default=0.2)
    command.add_argument("--entropy-coef", type=float, default=sizes["entropy_coef"])
    command.add_argument(
        "--behavior-noise",
        type=float,
        default=0.3,
        help="standard deviation of behaviour minus policy logprob, off policy; nats",
    )
    command.add_argument("--seed", type=int, default=0)


def _add_reports(command: argparse.ArgumentParser) -> None:
    command.add_argument("--iters", type=int, default=20, help="timed rounds")
    command.add_argument("--warmup", type=int, default=3, help="rounds before them")
    command.add_argument(
        "--check-tokens", type=int, default=64, help="tokens that are compared with float64"
    )
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the measurements there; without FILE to stdout, instead of the table",
    )
    command.add_argument("--wandb-project", help="log every competitor as a W&B run")
    command.add_argument("--wandb-mode", choices=WANDB_MODES, default="online")
