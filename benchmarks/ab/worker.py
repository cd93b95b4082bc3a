"""The child process of an A/B comparison: trains one implementation over recorded steps.

    python -m benchmarks.ab.worker JOB.json RESULT.json

A process of its own has its own peak of memory and compiles for itself. Exits with 2, and one
message, where the job cannot be done on this machine.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import resource
import sys
import time
from collections.abc import Sequence
from importlib import metadata

import jax
import numpy as np

from benchmarks.ab.job import RunResult, StepResult, TrainingJob, WrongInput
from benchmarks.compiled_program import ProgramSizes, program_sizes, whole_bytes
from kernels import choose
from learner.config import LearnerConfig
from learner.core import LearnerCore
from learner.durable.rollout_file import RolloutHeader, read_groups, scan_rollouts
from learner.teacher import load_teacher
from models.files.checkpoint import load_model
from models.transformer import Params
from services.process.config_section import validated
from services.process.phase_clock import PhaseClock

PEAK_METRIC = "mem/peak_bytes_in_use_max"
PROCESS = "process, resident, compilation included"
DEVICES = "fullest device, in use"


def train(job: TrainingJob) -> RunResult:
    """Does the job in this process.

    Raises:
        WrongInput: if an implementation, the mesh or the model cannot work here.
    """
    devices = jax.devices()
    device = devices[0]
    for implementation in (job.implementation, *job.others):
        _resolve(implementation.loss_impl, device.platform)
    with jax.default_matmul_precision("highest") if job.exact else contextlib.nullcontext():
        core, steps, peak_bytes = _train_steps(job, devices)
    on_device = device.memory_stats() is not None
    temp, peak = _accumulate_bytes(core)
    return RunResult(
        implementation=job.implementation.name,
        resolved=_resolve(job.implementation.loss_impl, device.platform),
        platform=device.platform,
        device=f"{len(devices)} x {device.device_kind}",
        versions={"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")},
        steps=tuple(steps),
        peak_bytes=peak_bytes,
        peak_of=DEVICES if on_device else PROCESS,
        accumulate_temp_bytes=temp,
        accumulate_peak_bytes=peak,
    )


def _train_steps(
    job: TrainingJob, devices: Sequence[jax.Device]
) -> tuple[LearnerCore, list[StepResult], int]:
    """The core after the last step, the result of each step, and the peak in bytes until then."""
    path = pathlib.Path(job.rollouts)
    contents = scan_rollouts(path)
    assert contents.header is not None
    core = _make_core(job, contents.header, devices)
    if job.snapshot_start:
        _snapshot(job, "start", core.state.params)
    steps, peak_bytes = [], 0
    for place in contents.places[: job.steps]:
        groups = read_groups(path, place)
        clock, started = PhaseClock(), time.monotonic()
        metrics = core.update(groups, clock)
        compile_s = clock.peek()["compile"]
        update_s = time.monotonic() - started - compile_s
        steps.append(_step_result(place.step, metrics, job, update_s, compile_s))
        peak_bytes = int(metrics.get(PEAK_METRIC, _process_peak()))
        if place.step in job.snapshot_steps:
            _snapshot(job, str(place.step), core.state.params)
    return core, steps, peak_bytes


def _make_core(
    job: TrainingJob, header: RolloutHeader, devices: Sequence[jax.Device]
) -> LearnerCore:
    chosen = dataclasses.asdict(job.implementation)
    try:
        loaded = load_model(job.model)
        if (header.valid_vocab or 0) > loaded.config.vocab_size:
            raise ValueError(
                f"the model has {loaded.config.vocab_size} token ids, the rollouts were sampled "
                f"from {header.valid_vocab}: it is not the model of the run"
            )
        learner = validated(LearnerConfig, {**job.learner, **chosen})
        settings = dataclasses.replace(header, learner=learner)
        teacher = load_teacher(settings.algorithm, loaded.config)
        return LearnerCore(settings, loaded.config, loaded.params, devices=devices, teacher=teacher)
    except ValueError as error:
        raise WrongInput(f"{job.implementation.name} with model {job.model}: {error}") from error


def _resolve(choice: str, platform: str) -> str:
    try:
        return choose.resolve(choice, platform)
    except ValueError as error:
        raise WrongInput(str(error)) from error


def _step_result(
    step: int, metrics: dict[str, float], job: TrainingJob, update_s: float, compile_s: float
) -> StepResult:
    def finite(name):
        value = metrics.get(name, math.nan)
        return value if math.isfinite(value) else None

    updates = job.learner["updates_per_batch"]
    return StepResult(
        step=step,
        loss=finite("train/loss"),
        grad_norm=finite("train/grad_norm"),
        skipped=bool(metrics["train/update_skipped"]),
        valid_tokens=int(metrics["train/valid_tokens"]) * updates,
        update_s=update_s,
        compile_s=compile_s,
    )


def _snapshot(job: TrainingJob, name: str, params: Params) -> None:
    """Writes the parameters, one float32 file for each, under their paths in the tree."""
    assert job.snapshot_folder is not None
    folder = pathlib.Path(job.snapshot_folder) / name
    folder.mkdir(parents=True)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.save(folder / f"{name}.npy", np.asarray(leaf), allow_pickle=False)


def _process_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _accumulate_bytes(core: LearnerCore) -> tuple[int | None, int | None]:
    """Temporary and peak bytes of the largest program that forms gradients."""
    programs = [run for name, run in core.compiled.items() if name.startswith("accumulate")]
    sizes = [program_sizes(run) for run in programs if run.memory_analysis()]
    if not sizes:
        return None, None
    return max(one["temp_bytes"] for one in sizes), max(map(_peak_bytes, sizes))


def _peak_bytes(sizes: ProgramSizes) -> int:
    # The CPU compiler leaves what is temporary out of its peak.
    if sizes["peak_bytes"] > sizes["temp_bytes"]:
        return sizes["peak_bytes"]
    return whole_bytes(sizes)


def main(job_path: str, result_path: str) -> int:
    """Returns the exit code; the result is JSON, and absent where the job could not be done."""
    job = TrainingJob.from_plain(json.loads(pathlib.Path(job_path).read_text()))
    try:
        result = train(job)
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(dataclasses.asdict(result), allow_nan=False)
    pathlib.Path(result_path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
