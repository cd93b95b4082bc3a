"""Trains on recorded rollouts with several implementations and compares them.

The others are compared with the first implementation. Each trains in a process of its own, so that
one learner is in memory at a time and each compiles for itself; this process touches no device.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import sys
import tempfile
import typing
from collections.abc import Callable, Sequence

from benchmarks.ab import compare
from benchmarks.ab.compare import Comparison, Tolerances
from benchmarks.ab.interrupt import ComparisonInterrupted, Interrupts
from benchmarks.ab.job import Implementation, RunFailed, RunResult, TrainingJob, WrongInput
from benchmarks.ab.report import Report, report_json, report_text
from benchmarks.report_file import check_report_file
from learner.config import LearnerConfig
from learner.durable.rollout_file import Contents, scan_rollouts
from services.process.config_section import validated

Launch = Callable[[TrainingJob], RunResult]

_EPILOG = """\
record rollouts with `python -m driver --config run.yaml --set log.record_rollouts=true`: the run
writes rollouts.bin into its output folder. Training starts from the run's model, whatever step was
recorded first, so the same numbers come out every time. Parameters to compare are written to
$TMPDIR: 4 bytes a parameter, for the start, and twice for every check.

exit codes: 0 the implementations agree, 1 they do not or one could not train, 2 wrong input,
130 and 143 interrupted by SIGINT and SIGTERM
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m learner.ab`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m learner.ab",
        description="Trains on frozen rollouts with several implementations of head and loss, and "
        "compares their losses, gradients, updates, time and memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rollouts", required=True, metavar="FILE", help="what a run recorded")
    add(
        "--impl",
        required=True,
        metavar="HEAD:IMPL,..",
        help="at least two of learner.lm_head:learner.loss_impl, such as "
        "logits:reference,fast:xla; a head alone means :auto",
    )
    add("--steps", type=int, metavar="N", help="recorded steps to train on (default: all)")
    add("--check-every", type=int, metavar="K", help="compare parameters every K steps too")
    add("--repeat", type=int, default=1, metavar="R", help="runs of each, taking turns, for timing")
    add("--model", metavar="PATH", help="folder, .gguf file or hub id (default: as recorded)")
    add("--compute-dtype", metavar="DTYPE", help="bfloat16 or float32 (default: as recorded)")
    add("--mesh", metavar="DATA,FSDP[,CONTEXT]", help="device mesh (default: as recorded)")
    for name, what in (("loss", "loss"), ("grad-norm", "gradient norm"), ("update", "update")):
        add(
            f"--{name}-tol",
            type=float,
            metavar="X",
            help=f"largest relative difference in {what} (default: by the arithmetic's noise)",
        )
    add("--json", metavar="FILE", help="write everything there as JSON")
    return parser


def main(arguments: Sequence[str] | None = None, launch: Launch | None = None) -> int:
    """Returns the exit code.

    Args:
        launch: does one job; None does each in a child process.
    """
    given = parser().parse_args(arguments)
    try:
        report = _report(given, launch)
    except ComparisonInterrupted as interrupted:
        print(interrupted, file=sys.stderr)
        return interrupted.exit_code
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report_text(report))
    if given.json:
        pathlib.Path(given.json).write_text(
            json.dumps(report_json(report), allow_nan=False, indent=1)
        )
    return 1 if report.disagreements else 0


def _report(given: argparse.Namespace, launch: Launch | None) -> Report:
    """Does the comparison; the folder is removed with signals blocked, also after an error."""
    with (
        Interrupts() as interrupts,
        tempfile.TemporaryDirectory(prefix="tandem-ab-") as folder,
        interrupts.raised(),
    ):
        scratch = pathlib.Path(folder)
        plan = _plan(given, scratch)
        return _compare(plan, given, launch or _Child(scratch, interrupts))


def parse_implementations(text: str) -> tuple[Implementation, ...]:
    """Reads `--impl`.

    Raises:
        WrongInput: naming what is unknown, cannot be combined or is too little.
    """
    found = [_implementation(spec.strip()) for spec in text.split(",")]
    if len(found) < 2:
        raise WrongInput(f"--impl {text!r} names 1 implementation: give at least 2, by commas")
    return tuple(found)


def _implementation(spec: str) -> Implementation:
    lm_head, colon, loss_impl = spec.partition(":")
    loss_impl = loss_impl if colon else "auto"
    heads, impls = (_choices(name) for name in ("lm_head", "loss_impl"))
    if lm_head not in heads or loss_impl not in impls:
        raise WrongInput(
            f"--impl {spec!r}: did you mean {loss_impl}:{lm_head}?"
            if loss_impl in heads and lm_head in impls
            else f"--impl {spec!r}: write HEAD:IMPL, a head of {', '.join(heads)} and an "
            f"implementation of {', '.join(impls)}"
        )
    one = Implementation(lm_head=lm_head, loss_impl=loss_impl)
    try:
        validated(LearnerConfig, dataclasses.asdict(one))
    except ValueError as error:
        raise WrongInput(f"--impl {spec!r}: {error}") from None
    return one


def _choices(field: str) -> tuple[str, ...]:
    """What a key of the `learner` section may be."""
    return typing.get_args(LearnerConfig.model_fields[field].annotation)


def _plan(given: argparse.Namespace, scratch: pathlib.Path) -> list[TrainingJob]:
    """One job for each implementation, all checked.

    Raises:
        WrongInput: naming value, rule and fix.
    """
    implementations = parse_implementations(given.impl)
    contents = _contents(given.rollouts)
    assert contents.header is not None
    recorded = len(contents.places)
    steps = recorded if given.steps is None else given.steps
    if not 1 <= steps <= recorded:
        raise WrongInput(f"--steps {steps}: {given.rollouts} has steps 1 to {recorded}")
    for option, value in (("--check-every", given.check_every), ("--repeat", given.repeat)):
        if value is not None and value < 1:
            raise WrongInput(f"{option} {value}: must be at least 1")
    for option, value in _given_tolerances(given).items():
        if value is not None and not 0 <= value < math.inf:
            raise WrongInput(f"--{option.replace('_', '-')}-tol {value}: must be 0 or above")
    try:
        check_report_file(given.json)
    except ValueError as error:
        raise WrongInput(error) from None
    learner = _learner_section(contents, given)
    _check_rate(learner, steps)
    every = given.check_every or steps
    checked = [p.step for n, p in enumerate(contents.places[:steps], 1) if n % every == 0]
    last = contents.places[steps - 1].step
    return [
        TrainingJob(
            rollouts=given.rollouts,
            model=given.model or _model_of(contents),
            implementation=one,
            others=implementations,
            learner=learner.model_dump(mode="json"),
            steps=steps,
            snapshot_steps=tuple(sorted({*checked, last})),
            snapshot_folder=str(scratch / str(number)),
            snapshot_start=number == 0,
            exact=False,
        )
        for number, one in enumerate(implementations)
    ]


def _contents(path: str) -> Contents:
    try:
        contents = scan_rollouts(pathlib.Path(path))
    except OSError as error:
        raise WrongInput(
            f"--rollouts {path}: {error.strerror}: give the rollouts.bin of a run that had "
            "log.record_rollouts=true"
        ) from error
    except ValueError as error:
        raise WrongInput(f"--rollouts {error}") from error
    if not contents.places:
        raise WrongInput(f"--rollouts {path} has no complete step: record at least one")
    if contents.cut_at is not None:
        print(
            f"notice: {path} is cut short after step {contents.places[-1].step} (byte "
            f"{contents.cut_at}): the unfinished record is left out",
            file=sys.stderr,
        )
    return contents


def _model_of(contents: Contents) -> str:
    """The run's initial weights: the recorded snapshot of a hub id, if it still exists."""
    assert contents.header is not None
    folder = contents.header.model_folder
    return folder if folder and pathlib.Path(folder).is_dir() else contents.header.model_path


def _learner_section(contents: Contents, given: argparse.Namespace) -> LearnerConfig:
    assert contents.header is not None
    section = contents.header.learner.model_dump(mode="json")
    if given.compute_dtype is not None:
        dtypes = _choices("compute_dtype")
        if given.compute_dtype not in dtypes:
            raise WrongInput(
                f"--compute-dtype {given.compute_dtype!r}: must be {' or '.join(dtypes)}"
            )
        section["compute_dtype"] = given.compute_dtype
    if given.mesh is not None:
        try:
            data, fsdp, context = map(int, f"{given.mesh},1".split(",")[:3])
        except ValueError:
            raise WrongInput(
                f"--mesh {given.mesh!r}: give two whole numbers, DATA,FSDP, such as "
                "1,-1, or three, DATA,FSDP,CONTEXT"
            ) from None
        section["mesh"] = {"data": data, "fsdp": fsdp, "context": context}
    try:
        return validated(LearnerConfig, section)
    except ValueError as error:
        raise WrongInput(f"--mesh {given.mesh}: {error}") from None


def _check_rate(learner: LearnerConfig, steps: int) -> None:
    """Raises WrongInput if every update would be at a learning rate of 0 and move nothing."""
    optimizer, updates = learner.optimizer, steps * learner.updates_per_batch
    if optimizer.learning_rate == 0:
        raise WrongInput("--rollouts: the run's learning rate is 0, so no parameter would move")
    if updates == 1 and optimizer.warmup_steps > 0:
        raise WrongInput(
            f"--steps {steps}: the run's warm-up starts at a learning rate of 0, so that its first "
            "update moves nothing: take at least 2 steps, or record a run with "
            "learner.optimizer.warmup_steps=0"
        )


def _given_tolerances(given: argparse.Namespace) -> dict[str, float | None]:
    return {name: getattr(given, f"{name}_tol") for name in Tolerances._fields}


def _compare(plan: list[TrainingJob], given: argparse.Namespace, launch: Launch) -> Report:
    """Runs every job, the first one in exact arithmetic where that is needed, and judges."""
    first_job, *other_jobs = plan
    first = launch(first_job)
    runs, comparisons = [[first]], []
    for job in other_jobs:
        comparisons.append(_against(first_job, job, launch))
        runs.append([comparisons[-1].run])
    for repetition in range(1, given.repeat):
        turn = list(zip(plan, runs, strict=True))
        for job, results in turn if repetition % 2 == 0 else reversed(turn):
            results.append(launch(_without_snapshots(job)))
            comparisons.append(Comparison(run=results[-1], changes=()))
    _check_movement(comparisons[0])

    wanted = _given_tolerances(given)
    exact = None
    if not _is_exact(first_job, first) and None in wanted.values():
        exact = _against(first_job, _exactly(first_job), launch)
    defaults = compare.EXACT if exact is None else compare.measured_tolerances(first, exact)
    tolerances = Tolerances(
        **{n: getattr(defaults, n) if value is None else value for n, value in wanted.items()}
    )
    return Report(
        rollouts=given.rollouts,
        model=first_job.model,
        compute_dtype=first_job.learner["compute_dtype"],
        runs=tuple(tuple(results) for results in runs),
        comparisons=tuple(comparisons),
        exact=exact,
        tolerances=tolerances,
        disagreements=tuple(compare.disagreements(first, comparisons, tolerances)),
    )


def _against(first: TrainingJob, job: TrainingJob, launch: Launch) -> Comparison:
    """Does a job and compares its parameters with those of the first, then drops them."""
    assert first.snapshot_folder is not None and job.snapshot_folder is not None
    run = launch(job)
    ours, theirs = pathlib.Path(first.snapshot_folder), pathlib.Path(job.snapshot_folder)
    changes = tuple(
        compare.compare_snapshots(ours / "start", ours / str(step), theirs / str(step), step)
        for step in job.snapshot_steps
    )
    shutil.rmtree(theirs)
    return Comparison(run=run, changes=changes)


def _is_exact(job: TrainingJob, run: RunResult) -> bool:
    return job.learner["compute_dtype"] == "float32" and run.platform == "cpu"


def _exactly(job: TrainingJob) -> TrainingJob:
    return dataclasses.replace(
        job,
        learner={**job.learner, "compute_dtype": "float32"},
        exact=True,
        snapshot_folder=f"{job.snapshot_folder}-exact",
        snapshot_start=False,
    )


def _without_snapshots(job: TrainingJob) -> TrainingJob:
    return dataclasses.replace(job, snapshot_folder=None, snapshot_start=False, snapshot_steps=())


def _check_movement(comparison: Comparison) -> None:
    """Raises WrongInput if no update moved anything: then all implementations seem equal."""
    last = comparison.changes[-1]
    if last.update_norm == 0 and last.other_norm == 0:
        raise WrongInput(
            f"after step {last.step} no parameter has moved, so there is nothing to compare: take "
            "more --steps (the learning rate starts at 0 in a warm-up), or record groups whose "
            "rewards differ"
        )


class _Child:
    """Does each job in a fresh process; only this process uses a device."""

    def __init__(self, scratch: pathlib.Path, interrupts: Interrupts):
        self._scratch = scratch
        self._interrupts = interrupts

    def __call__(self, job: TrainingJob) -> RunResult:
        job_path, result_path = self._scratch / "job.json", self._scratch / "result.json"
        job_path.write_text(json.dumps(dataclasses.asdict(job), allow_nan=False))
        result_path.unlink(missing_ok=True)
        name = job.implementation.name
        print(f"training {name}{' in float32' if job.exact else ''}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.ab.worker", str(job_path), str(result_path)]
        code = self._interrupts.run(command)
        if code == 2:
            raise WrongInput(f"{name} cannot be trained here, for the reason above")
        if code != 0:
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise RunFailed(f"{name}: its process {ended} before the last step")
        return RunResult.from_plain(json.loads(result_path.read_text()))
