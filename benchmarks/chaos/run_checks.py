"""Checks of the files that a run has written: pure functions.

Lines that a resume moved to `*.superseded.jsonl` are of work that was done again and are not read.
"""

import collections
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
import numpy as np
import safetensors.numpy

CERTIFIED = ("weights", "optimizer", "data_order", "keys")
"""Entries of a checkpoint's certificate that are equal after equal training."""
ERRORS = "reward_error/count"
COMPARED = (
    *("reward/total/mean", "train/loss", "train/grad_norm", ERRORS),
    *("rollout/turns_mean", "rollout/records_mean"),
)
"""Metrics that are equal to the bit after equal training: they name the step of a divergence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Logs and result of one run."""

    ledger: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    checkpoints: tuple[int, ...]
    """Steps with a checkpoint that was finished."""
    parameters: dict[str, np.ndarray]
    """Of the exported policy; empty where there is none."""
    certificate: dict[str, str]
    """Of the last of those checkpoints; empty where there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accounting:
    """How the groups of a run ended."""

    lost: tuple[str, ...]
    """Ids below the highest one that neither ended nor can be in progress."""
    duplicated: tuple[str, ...]
    """Ids that ended more than once, as trained or otherwise."""
    problems: tuple[str, ...]
    """Every other inconsistency, one sentence each."""


def read_run(folder: pathlib.Path) -> RunFiles:
    """Reads the output folder of a run that has ended."""
    export = folder / "export" / "model.safetensors"
    manifests = folder.glob("checkpoints/step-????????/manifest.json")
    complete = sorted(manifest.parent for manifest in manifests)
    certificate = complete[-1] / "certificate.json" if complete else None
    return RunFiles(
        ledger=read_lines(folder / "ledger.jsonl"),
        metrics=read_lines(folder / "metrics.jsonl"),
        samples=read_lines(folder / "samples.jsonl"),
        checkpoints=tuple(int(path.name.split("-")[1]) for path in complete),
        parameters=safetensors.numpy.load_file(export) if export.exists() else {},
        certificate=json.loads(certificate.read_text()) if certificate else {},
    )


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that is being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def end_states(ledger: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The states in which each group ended, by id; further deliveries of it do not count."""
    found = collections.defaultdict(list)
    for line in ledger:
        for state, ids in line["groups"].items():
            if state != "duplicate":
                for group_id in ids:
                    found[group_id].append(state)
    return dict(found)


def check_accounting(
    run: RunFiles, *, steps: int, expected: Iterable[str] | None = None
) -> Accounting:
    """Checks that each group of a finished run ended once, and that each step has one line.

    Args:
        run: as read.
        steps: that it was to take.
        expected: ids that must have been trained, no more and no fewer; None where two runs may
            differ in that, and every id below the highest must have ended or be in progress.
    """
    ended = end_states(run.ledger)
    twice = tuple(sorted(group_id for group_id, states in ended.items() if len(states) > 1))
    problems = [
        *_check_steps("ledger.jsonl", run.ledger, steps),
        *_check_steps("metrics.jsonl", run.metrics, steps),
    ]
    if steps not in run.checkpoints:
        problems.append(f"no checkpoint of step {steps}; there are {list(run.checkpoints)}")
    if not run.parameters:
        problems.append("no policy was exported")
    if expected is None:
        lost = _unaccounted(ended, run.ledger)
    else:
        trained = {group_id for group_id, states in ended.items() if "trained" in states}
        lost = tuple(sorted(set(expected) - trained))
        if more := sorted(trained - set(expected)):
            problems.append(f"{len(more)} groups were trained that should not be, first {more[0]}")
    return Accounting(lost=lost, duplicated=twice, problems=tuple(problems))


def check_staleness(metrics: Iterable[Mapping[str, Any]], bound: int) -> list[str]:
    """One line for every step that trained on a group that was too old."""
    return [
        f"step {line['step']} trained on a group {line['offpolicy/staleness_max']:g} versions old, "
        f"at most {bound} are allowed"
        for line in metrics
        if line.get("offpolicy/staleness_max", 0) > bound
    ]


def check_errors(run: RunFiles, expected: Mapping[int, str]) -> list[str]:
    """One line for each step with errors that should have none, or without those it should have.

    Args:
        run: as read.
        expected: patterns of their texts, by step.
    """
    counts = {line["step"]: line.get(ERRORS, 0) for line in run.metrics}
    found = []
    for step in sorted(step for step, count in counts.items() if count or step in expected):
        errors = {line["reward_error"] for line in run.samples if line["step"] == step} - {""}
        wanted = expected.get(step, "")
        right = counts[step] and errors and all(re.fullmatch(wanted, text) for text in errors)
        if not right:
            found.append(
                f"step {step} has {counts[step]:g} errors of rewards, {sorted(errors)}: it should "
                f"have {f'some like {wanted}' if wanted else 'none'}"
            )
    return found


def different_tensors(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the tensors that are not equal bit for bit, or that one side lacks."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or _bits(one[name]) != _bits(other[name])
    )


def different_components(one: RunFiles, other: RunFiles) -> list[str]:
    """Components of the last checkpoints whose hashes differ, or that one side lacks."""
    return [
        name
        for name in CERTIFIED
        if name not in one.certificate or one.certificate[name] != other.certificate.get(name)
    ]


def first_difference(
    one: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    names: Sequence[str] = COMPARED,
) -> str:
    """The first step and metric in which two runs diverge; '' if they do not."""
    for mine, theirs in zip(one, other, strict=False):
        for name in names:
            if mine.get(name) != theirs.get(name):
                return (
                    f"the runs diverge at step {mine['step']}: {name} is {mine.get(name)} and "
                    f"{theirs.get(name)}"
                )
    return ""


def last_line(
    *, faults: int, lost: int, duplicated: int, parameters_equal: bool | None, seconds: float
) -> str:
    """The summary line, for programs; None means that parameters were not compared."""
    compared = {True: "equal", False: "different", None: "not compared"}[parameters_equal]
    return (
        f"chaos: faults {faults}, lost {lost}, duplicated {duplicated}, parameters {compared}, "
        f"seconds {seconds:.0f}"
    )


def _check_steps(name: str, lines: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    found = [line["step"] for line in lines if line["step"] > 0]
    if found == list(range(1, steps + 1)):
        return []
    missing = sorted(set(range(1, steps + 1)) - set(found))
    repeated = sorted(step for step, n in collections.Counter(found).items() if n > 1)
    return [
        f"{name} should have the steps 1 to {steps} in order, once each: missing {missing}, "
        f"repeated {repeated}, last {found[-1] if found else 'none'}"
    ]


def _unaccounted(
    ended: Mapping[str, Sequence[str]], ledger: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Ids below the highest that did not end, beyond those in progress in the last line."""
    if not ended:
        return ()
    highest = max(int(group_id.removeprefix("g")) for group_id in ended)
    missing = [f"g{index:08d}" for index in range(highest) if f"g{index:08d}" not in ended]
    in_progress = ledger[-1]["outstanding"]
    return tuple(missing[in_progress:])


def _bits(tensor: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return tensor.dtype.name, tensor.shape, tensor.tobytes()
