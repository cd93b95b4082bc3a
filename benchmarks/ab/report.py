"""The result of an A/B comparison as a table for people and as JSON for programs."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.ab.compare import (
    Comparison,
    Disagreement,
    Tolerances,
    grad_norm_difference,
    loss_difference,
)
from benchmarks.ab.job import RunResult, StepResult
from benchmarks.report_file import INTERPRETED
from kernels import choose

STEP_ROW = "{:>6} {:<18} {:>13} {:>12} {:>7} {:>10} {:>10}"
COST_ROW = "{:<18} {:<16} {:>10} {:>7} {:>10} {:>9} {:>9} {:>10}"
AGREE_ROW = "{:<18} {:>10} {:>10} {:>11} {:>12} {:>12}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was found out."""

    rollouts: str
    model: str
    compute_dtype: str
    runs: tuple[tuple[RunResult, ...], ...]
    """Of every implementation its repetitions."""
    comparisons: tuple[Comparison, ...]
    """Of all but the first implementation, and of repetitions, which have no changes."""
    exact: Comparison | None
    """The first implementation against itself in exact arithmetic."""
    tolerances: Tolerances
    disagreements: tuple[Disagreement, ...]


def median_ms_per_token(runs: Sequence[RunResult]) -> float | None:
    """Over all steps, of all repetitions, that trained on a token."""
    times = [step.ms_per_token for run in runs for step in run.steps]
    known = [ms for ms in times if ms is not None]
    return statistics.median(known) if known else None


def report_text(report: Report) -> str:
    """Steps, costs, agreement and the verdict, each a table of its own."""
    first = report.runs[0][0]
    return "\n".join(
        [
            f"{len(first.steps)} recorded steps of {report.rollouts}",
            f"model {report.model}, {report.compute_dtype}, {first.device} ({first.platform})",
            "",
            *_step_lines(report),
            "",
            *_cost_lines(report),
            "",
            *_agreement_lines(report),
            "",
            *_verdict_lines(report),
        ]
    )


def _step_lines(report: Report) -> list[str]:
    lines = [
        STEP_ROW.format(
            "step", "implementation", "loss", "grad norm", "tokens", "update s", "ms/token"
        )
    ]
    for at in range(len(report.runs[0][0].steps)):
        for repetitions in report.runs:
            step = repetitions[0].steps[at]
            lines.append(
                STEP_ROW.format(
                    step.step,
                    repetitions[0].implementation,
                    _number(step.loss, "+.6e"),
                    _number(step.grad_norm, ".6g"),
                    step.valid_tokens,
                    f"{step.update_s:.4f}",
                    _number(step.ms_per_token, ".4f"),
                )
            )
    return lines


def _cost_lines(report: Report) -> list[str]:
    baseline = median_ms_per_token(report.runs[0])
    rows = [
        COST_ROW.format(
            "", "runs", "ms/token", "vs 1st", "peak MB", "temp MB", "prog. MB", "compile s"
        )
    ]
    for repetitions in report.runs:
        run, ms = repetitions[0], median_ms_per_token(repetitions)
        rows.append(
            COST_ROW.format(
                run.implementation,
                run.resolved,
                _number(ms, ".4f"),
                _number(ms / baseline if ms and baseline else None, ".2f"),
                _megabytes(max(one.peak_bytes for one in repetitions)),
                _megabytes(run.accumulate_temp_bytes),
                _megabytes(run.accumulate_peak_bytes),
                f"{sum(step.compile_s for step in run.steps):.1f}",
            )
        )
    times = len(report.runs[0])
    return [
        *rows,
        f"ms/token: median over the steps of {times} run{'s' if times > 1 else ''}, per valid "
        "token, the whole update without compilation",
        f"peak: {report.runs[0][0].peak_of}; temp and prog.: the compiler's, of the program that "
        "forms gradients, without and with its arguments and results",
        *[INTERPRETED] * any(runs[0].resolved == choose.PALLAS_INTERPRET for runs in report.runs),
    ]


def _agreement_lines(report: Report) -> list[str]:
    head = AGREE_ROW.format(
        "largest difference", "loss", "grad norm", "update", "params max", "params rel."
    )
    rows = [_agreement_row(report, one, one.run.implementation) for one in report.comparisons]
    if report.exact is not None:
        rows.append(_agreement_row(report, report.exact, "1st, float32"))
    tolerance = report.tolerances
    limits = AGREE_ROW.format(
        "tolerance",
        f"{tolerance.loss:.1e}",
        f"{tolerance.grad_norm:.1e}",
        f"{tolerance.update:.1e}",
        "-",
        "-",
    )
    return [head, *rows, limits]


def _agreement_row(report: Report, one: Comparison, name: str) -> str:
    pairs = list(zip(report.runs[0][0].steps, one.run.steps, strict=True))
    changes = one.changes
    return AGREE_ROW.format(
        name,
        _number(_largest(loss_difference(a.loss, b.loss) for a, b in pairs), ".1e"),
        _number(_largest(grad_norm_difference(a.grad_norm, b.grad_norm) for a, b in pairs), ".1e"),
        _number(_largest(change.update_relative for change in changes), ".1e"),
        _number(_largest(change.params_max for change in changes), ".1e"),
        _number(_largest(change.params_relative for change in changes), ".1e"),
    )


def _verdict_lines(report: Report) -> list[str]:
    first = report.runs[0][0].implementation
    if not report.disagreements:
        names = ", ".join(runs[0].implementation for runs in report.runs[1:])
        return [f"{names} agree{'s' if len(report.runs) == 2 else ''} with {first}"]
    return [
        f"DISAGREE at step {one.step} in {one.quantity}{' norm' * (one.quantity == 'update')}: "
        f"{one.implementation} {_number(one.value, '.9g')}, {first} "
        f"{_number(one.first_value, '.9g')}; difference {_number(one.difference, '.2e')}, "
        f"tolerance {one.tolerance:.2e}"
        for one in report.disagreements
    ]


def report_json(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    first = report.runs[0]
    baseline = median_ms_per_token(first)
    return {
        "rollouts": report.rollouts,
        "model": report.model,
        "compute_dtype": report.compute_dtype,
        "agree": not report.disagreements,
        "tolerances": report.tolerances._asdict(),
        "disagreements": [one._asdict() for one in report.disagreements],
        "implementations": [_plain_runs(runs, baseline) for runs in report.runs],
        "differences": [_plain_comparison(first[0], one) for one in report.comparisons],
        "exact": _plain_comparison(first[0], report.exact) if report.exact else None,
    }


def _plain_runs(runs: Sequence[RunResult], baseline: float | None) -> dict[str, Any]:
    ms = median_ms_per_token(runs)
    return {
        "implementation": runs[0].implementation,
        "median_ms_per_token": ms,
        "time_vs_first": ms / baseline if ms and baseline else None,
        "peak_bytes": max(run.peak_bytes for run in runs),
        "runs": [
            {**dataclasses.asdict(run), "steps": [_plain_step(step) for step in run.steps]}
            for run in runs
        ],
    }


def _plain_step(step: StepResult) -> dict[str, Any]:
    return {**dataclasses.asdict(step), "ms_per_token": step.ms_per_token}


def _plain_comparison(first: RunResult, one: Comparison) -> dict[str, Any]:
    pairs = list(zip(first.steps, one.run.steps, strict=True))
    return {
        "implementation": one.run.implementation,
        "steps": [
            {
                "step": a.step,
                "loss": loss_difference(a.loss, b.loss),
                "grad_norm": grad_norm_difference(a.grad_norm, b.grad_norm),
            }
            for a, b in pairs
        ],
        "params": [change._asdict() for change in one.changes],
    }


def _largest(values) -> float | None:
    """None where there is no value, or one is unknown."""
    known = list(values)
    return max(known) if known and None not in known else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"
