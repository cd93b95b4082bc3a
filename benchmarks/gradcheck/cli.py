"""Compares the gradient of the summed loss with float64, on random data and on a real model.

    python -m kernels.gradcheck
    python -m kernels.gradcheck --impl xla,pallas --schedule fast,lean --model FOLDER_OR_GGUF
    python -m kernels.gradcheck --config check.json --tolerance float32.rel_l2=1e-6

A summed loss has gradients of the size of one token's, whatever the number of tokens, so that
relative bounds bind. An array passes if its relative l2 error, its cosine and its worst row are
within the tolerances, if it is not zero throughout, and if the rows without a gradient are zero.
Of attention the output and the gradients in query, key and value are checked, on packed rows.
With --model the other cases run on a real model. The hard case puts unusual data on 20 tokens, and
the tokens are divided among 3 sequences: hence at least 21 of them. On two cores of a CPU the
default sizes take half a minute with XLA, and some three with Pallas, which is interpreted there.
The JSON file of --config has the keys of the flags: impl, schedule, case, model, tolerance,
tokens, width, vocab, seed; a flag wins over it. Exits with 1 when anything fails, with 2 when the
arguments are wrong.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import psutil

from benchmarks.gradcheck.attention import ATTENTION_CASES, check_attention
from benchmarks.gradcheck.cases import BATCH, CASES, head_problem, logits_problem, make_problem
from benchmarks.gradcheck.gradient_errors import (
    TOLERANCES,
    Candidate,
    GradientError,
    Tolerance,
    check_gradient,
    head_candidate,
    logits_candidate,
)
from benchmarks.kernels.case import MOST
from benchmarks.report_file import (
    INTERPRETED,
    STDOUT,
    check_report_file,
    json_values,
    versions,
    write_report,
)
from kernels import choose
from kernels.linear_objective.schedule import SCHEDULES
from kernels.token_logprob.ops import token_logprob

SMALLEST = {"tokens": 21, "width": 1, "vocab": 32, "seed": 0}
SIZE_HELP = {
    "tokens": f"a multiple of {BATCH}, the sequences; the hard case needs 20 of its own",
    "width": "of the hidden states",
    "vocab": "columns; the hard case has 7 of no token",
    "seed": "of the random data",
}
LISTS = ("impl", "schedule", "case")
CASE_NAMES = tuple(case.name for case in (*CASES, *ATTENTION_CASES))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        settings = read_settings(vars(arguments))
        check_report_file(arguments.json)
        check_fits(settings, psutil.virtual_memory().available)
        device = jax.devices()[0]
        at_logits, at_head = make_candidates(settings, device.platform)
        arrays = None if settings.model is None else _model_arrays(settings)
    except (ValueError, OSError) as error:
        print(f"gradcheck: {error}", file=sys.stderr)
        return 2
    say = functools.partial(
        print, file=sys.stderr if arguments.json == STDOUT else None, flush=True
    )
    say("\n".join(header(settings, device)))
    findings = []
    impls = [choose.resolve(choice, device.platform) for choice in settings.impl]
    checks = run_checks(settings, at_logits, at_head, arrays)
    for finding in itertools.chain(checks, run_attention_checks(settings, impls)):
        findings.append(finding)
        if arguments.json != STDOUT:
            say(table_row(finding))
    failed = [finding for finding in findings if finding.problems]
    say(f"{len(findings) - len(failed)} of {len(findings)} gradients pass")
    if arguments.json is not None:
        write_report(_report(settings, device, findings), arguments.json)
    return 1 if failed else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is checked."""

    impl: tuple[str, ...] = ("auto",)
    """Of `kernels.choose.CHOICES`."""
    schedule: tuple[str, ...] = SCHEDULES
    case: tuple[str, ...] = CASE_NAMES
    model: str | None = None
    tolerance: dict[str, Tolerance] = dataclasses.field(default_factory=lambda: TOLERANCES)
    tokens: int = 45
    width: int = 64
    vocab: int = 1031
    seed: int = 0

    def __post_init__(self):
        known = {"impl": choose.CHOICES, "schedule": SCHEDULES, "case": CASE_NAMES}
        for key, allowed in known.items():
            chosen = getattr(self, key)
            if not isinstance(chosen, tuple):
                raise ValueError(f"--{key} must be a list of names, got {chosen!r}")
            for one in chosen or ("",):
                if one not in allowed:
                    raise ValueError(f"--{key} takes of {', '.join(allowed)}; got {one!r}")
        for key, least in SMALLEST.items():
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"--{key} must be a whole number of at least {least}, got {value!r}"
                )
            if value > MOST:
                raise ValueError(f"--{key} must be at most {MOST}, got {value}")
        if self.tokens % BATCH:
            raise ValueError(f"--tokens must be a multiple of {BATCH}, got {self.tokens}")
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"--model must be a path, got {self.model!r}")


def check_fits(settings: Settings, available: int | None) -> None:
    """Refuses random problems that do not fit the host's memory.

    Args:
        available: bytes; None if unknown.

    Raises:
        ValueError: with both sizes and what to do.
    """
    # float64: drawing a problem holds seven arrays of the logits' size, and the head, at once.
    needed = 8 * settings.vocab * (7 * settings.tokens + settings.width)
    if available is not None and needed > available:
        raise ValueError(
            f"a problem of these sizes needs {needed / 1e9:.2f} GB and the host has "
            f"{available / 1e9:.2f} GB: lower --tokens, --width or --vocab"
        )


def make_candidates(settings: Settings, platform: str) -> tuple[list[Candidate], list[Candidate]]:
    """Those that take logits, and those that take hidden states and a head.

    Raises:
        ValueError: if an implementation does not exist on the platform.
    """
    impls = [choose.resolve(choice, platform) for choice in settings.impl]
    at_logits = [
        logits_candidate(f"token_logprob {impl}", functools.partial(token_logprob, impl=impl))
        for impl in impls
    ]
    at_head = [
        head_candidate(impl, schedule)
        for impl in impls
        if impl != choose.REFERENCE  # it has no schedules; `token_logprob` stands for it
        for schedule in settings.schedule
    ]
    return at_logits, at_head


def run_checks(
    settings: Settings,
    at_logits: list[Candidate],
    at_head: list[Candidate],
    model: tuple[dict[str, np.ndarray], np.ndarray] | None,
) -> Iterator[GradientError]:
    """All findings, one problem after the other.

    Args:
        model: hidden states and head of a real model, and the ids of its tokens.
    """
    cases = [case for case in CASES if case.name in settings.case]
    sizes = {"tokens": settings.tokens, "vocab": settings.vocab, "seed": settings.seed}
    for dtype, tolerance in settings.tolerance.items():
        for case in cases:
            problem = logits_problem(case, dtype=dtype, **sizes)
            for candidate in at_logits:
                yield from check_gradient(problem, candidate, tolerance)
            problem = head_problem(case, dtype=dtype, width=settings.width, **sizes)
            for candidate in at_head:
                yield from check_gradient(problem, candidate, tolerance)
    if model is None:
        return
    arrays, ids_N = model
    for dtype, tolerance in settings.tolerance.items():
        for case in cases:
            rng = np.random.default_rng(settings.seed)
            problem = make_problem(case, arrays, ids_N, dtype=dtype, rng=rng)
            for candidate in [*at_logits, *at_head]:
                for finding in check_gradient(problem, candidate, tolerance):
                    yield finding._replace(case=f"model {case.name}")


def run_attention_checks(settings: Settings, impls: list[str]) -> Iterator[GradientError]:
    """Those of attention, by each of `kernels.choose.IMPLEMENTATIONS` that is asked for."""
    for dtype, tolerance in settings.tolerance.items():
        for case in ATTENTION_CASES:
            if case.name in settings.case:
                yield from check_attention(
                    case, impls, dtype=dtype, tolerance=tolerance, seed=settings.seed
                )


def _model_arrays(settings: Settings) -> tuple[dict[str, np.ndarray], np.ndarray]:
    from benchmarks.gradcheck.model_tokens import model_tokens

    assert settings.model is not None
    found = model_tokens(settings.model, tokens=settings.tokens)
    N = len(found.ids_N) // BATCH * BATCH
    return {"hidden": found.hidden_ND[:N], "head": found.head_VD}, found.ids_N[:N]


def read_settings(flags: Mapping[str, Any]) -> Settings:
    """Defaults, overridden by the file of --config, overridden by flags that are not None.

    Raises:
        ValueError: naming the key, the value and the rule.
        OSError: if the file cannot be read.
    """
    given: dict[str, Any] = {}
    if flags["config"] is not None:
        given = _read_config(pathlib.Path(flags["config"]))
    keys = [field.name for field in dataclasses.fields(Settings)]
    tolerances = dict(TOLERANCES)
    for dtype, changes in given.get("tolerance", {}).items():
        for name, value in changes.items():
            _set_tolerance(tolerances, f"{dtype}.{name}", value)
    for text in flags["tolerance"]:
        name, _, value = text.partition("=")
        _set_tolerance(tolerances, name, value)
    given |= {key: flags[key] for key in keys if key != "tolerance" and flags[key] is not None}
    for key in LISTS:
        if isinstance(given.get(key), str):
            given[key] = tuple(given[key].split(","))
        elif isinstance(given.get(key), list):
            given[key] = tuple(given[key])
    return Settings(**{**given, "tolerance": tolerances})


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--config {path} is not JSON: {error}") from error
    keys = [field.name for field in dataclasses.fields(Settings)]
    unknown = sorted(set(config) - set(keys)) if isinstance(config, dict) else [str(config)]
    if unknown:
        raise ValueError(f"--config {path} has {unknown[0]!r}; its keys are {', '.join(keys)}")
    tolerance = config.get("tolerance", {})
    if not isinstance(tolerance, dict) or not all(
        isinstance(each, dict) for each in tolerance.values()
    ):
        raise ValueError(f'--config {path}: tolerance must be like {{"float32": {{"rel_l2": 0}}}}')
    return config


def _set_tolerance(tolerances: dict[str, Tolerance], name: str, value: Any) -> None:
    dtype, _, field = name.partition(".")
    fields = [each.name for each in dataclasses.fields(Tolerance)]
    if dtype not in tolerances or field not in fields:
        raise ValueError(
            f"a tolerance is {' or '.join(tolerances)}, a dot, and one of {', '.join(fields)}; "
            f"got {name!r}"
        )
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"tolerance {name} must be a finite number, got {value!r}")
    tolerances[dtype] = dataclasses.replace(tolerances[dtype], **{field: number})


def header(settings: Settings, device: jax.Device) -> list[str]:
    """What the findings are of, as lines."""
    known = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    sizes = " ".join(f"{key} {getattr(settings, key)}" for key in SIZE_HELP)
    lines = [f"on {device.device_kind} ({device.platform}); {known}", sizes]
    if settings.model is not None:
        lines.append(f"model {settings.model}")
    for dtype, tolerance in settings.tolerance.items():
        bounds = ", ".join(f"{key} {value:g}" for key, value in vars(tolerance).items())
        lines.append(f"tolerances of {dtype}: {bounds}")
    resolved = [choose.resolve(choice, device.platform) for choice in settings.impl]
    return lines + [INTERPRETED] * (choose.PALLAS_INTERPRET in resolved)


def table_row(finding: GradientError) -> str:
    """One finding as a line."""
    row = "-" if finding.row is None else f"{finding.row:.1e}"
    verdict = "; ".join(finding.problems) or "ok"
    return (
        f"{finding.case:16} {finding.dtype:8} {finding.candidate:36} {finding.array:6} "
        f"loss {finding.loss_error:.1e}  rel l2 {finding.rel_l2:.1e}  "
        f"1-cos {finding.cosine_gap:8.1e}  worst row {row:7}  {verdict}"
    )


def _report(
    settings: Settings, device: jax.Device, findings: list[GradientError]
) -> dict[str, Any]:
    """For strict JSON: what is not finite becomes null; `problems` says what it was."""
    return json_values(
        {
            "passed": not any(finding.problems for finding in findings),
            "device": device.device_kind,
            "platform": device.platform,
            "versions": versions(),
            "settings": dataclasses.asdict(settings),
            "findings": [finding._asdict() for finding in findings],
        }
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gradcheck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Settings()
    parser.add_argument("--config", metavar="FILE", help="JSON with the settings below")
    for key in LISTS:
        chosen = ",".join(getattr(defaults, key))
        parser.add_argument(f"--{key}", help=f"separated by commas; default {chosen}")
    parser.add_argument("--model", help="HF folder, .gguf file or hub id, to be checked as well")
    for key, what in SIZE_HELP.items():
        bounds = f"default {getattr(defaults, key)}, at least {SMALLEST[key]}"
        parser.add_argument(f"--{key}", type=int, help=f"{what}; {bounds}")
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="DTYPE.NAME=VALUE",
        help="loss, rel_l2, cosine or row, by dtype; may be repeated",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the findings there; without FILE to stdout, instead of the table",
    )
    return parser
