"""Checks that a checkpoint resumes: repeats the step after it, and compares the weights.

Everything comes from the folder of the run: the checkpoint holds state, settings and run state; the
spool (the write-ahead log) holds the groups of the next update and the digest of its version.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from learner.core import LearnerCore
from learner.durable.certificate import Certificate, check_base, make_certificate
from learner.durable.checkpoint import CheckpointFolder, DamagedCheckpoint, read_record
from learner.durable.rollout_file import RolloutHeader, header_of
from learner.durable.segment_file import OpenWork, find_segments, read_segments, segments_since
from learner.teacher import load_teacher
from models.files.checkpoint import load_model, to_named
from models.platform import require_platform
from services.process.phase_clock import PhaseClock
from services.trajectories.id_set import IdSet
from services.weights.digest import tree_digest
from services.wire.messages import Group

CHECKPOINTS = "checkpoints"
SPOOL = "spool"


class NothingToCheck(ValueError):
    """The folder has no checkpoint with a step after it; the message says what is missing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A checkpoint, and what the run recorded of the step after it."""

    step: int
    policy_version: int
    header: RolloutHeader
    seed: int
    weights_dtype: str
    platform: str
    devices: int
    """On which the run was trained."""
    groups: tuple[Group, ...]
    """On which the next version was trained, in their order."""
    digest: str
    """Under which it was issued."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedStep:
    """The result of repeating a recorded step."""

    stored: dict[str, str] | None
    """The certificate in the checkpoint; None where it has none."""
    certificate: Certificate
    """Of what was read back."""
    digest: str
    """Of the version that was made now."""
    devices: str


def find_step(run_folder: pathlib.Path, step: int | None = None) -> RecordedStep:
    """The newest complete checkpoint that has a recorded step after it, or the one of a step.

    Raises:
        NothingToCheck: if there is none; says why for each checkpoint.
        DamagedFile: if the spool cannot be trusted.
    """
    folder = run_folder / CHECKPOINTS
    if not folder.is_dir():
        raise NothingToCheck(f"{run_folder} has no {CHECKPOINTS}/: give the output folder of a run")
    steps = CheckpointFolder(folder, keep=1).complete_steps()
    if step is not None and step not in steps:
        raise NothingToCheck(f"{folder} has no checkpoint of step {step}; it has {steps or 'none'}")
    reasons = []
    for candidate in steps if step is None else [step]:
        try:
            return _recorded_step(run_folder, candidate)
        except (DamagedCheckpoint, NothingToCheck) as error:
            reasons.append(str(error))
    raise NothingToCheck(
        f"no checkpoint in {folder} has a recorded step after it: {'; '.join(reasons) or 'none'}; "
        "checkpoint.keep=2 keeps one that has"
    )


def repeat_step(
    run_folder: pathlib.Path, recorded: RecordedStep, model_path: str | None = None
) -> RepeatedStep:
    """Restores the checkpoint and repeats the step after it.

    Args:
        run_folder: of the run.
        recorded: what `find_step` found in it.
        model_path: of the model that the run started from; None takes the recorded path, which a
            run that was submitted as a job may have had in the job's own folder.

    Raises:
        NothingToCheck: if the model cannot be loaded, or the checkpoint is gone.
        ValueError: if the checkpoint cannot be read.
    """
    header = recorded.header
    devices = require_platform(recorded.platform)
    try:
        loaded = load_model(model_path or header.model_folder or header.model_path)
    except ValueError as error:
        raise NothingToCheck(
            f"the model that the run started from cannot be loaded: {error}; give it by --model"
        ) from error
    try:
        teacher = load_teacher(header.algorithm, loaded.config)
    except ValueError as error:
        raise NothingToCheck(f"{error}: put the teacher back there") from error
    try:
        core = LearnerCore(header, loaded.config, loaded.params, devices=devices, teacher=teacher)
    except ValueError as error:
        raise NothingToCheck(f"{error}: put back what the run started from") from error
    checkpoints = CheckpointFolder(run_folder / CHECKPOINTS, keep=1)
    found = checkpoints.restore(core.abstract_state, only_step=recorded.step)
    if found is None:
        raise NothingToCheck(f"the checkpoint of step {recorded.step} is gone")
    if header.learner.lora is not None:
        digest = tree_digest(to_named(loaded.params, loaded.config))[1]
        try:
            check_base(found.record.get("base_digest"), digest, recorded.step)
        except ValueError as error:
            raise NothingToCheck(f"{error}; give it by --model") from error
    core.resume(found.state, policy_version=recorded.policy_version)
    certificate = make_certificate(
        core.state, seed=recorded.seed, driver_state=found.record["driver"]
    )
    core.update(recorded.groups, PhaseClock())
    return RepeatedStep(
        stored=found.certificate,
        certificate=certificate,
        digest=tree_digest(
            core.snapshot(recorded.weights_dtype, PhaseClock(), probe=False).tensors
        )[1],
        devices=f"{len(devices)} x {devices[0].device_kind}",
    )


def _recorded_step(run_folder: pathlib.Path, step: int) -> RecordedStep:
    folder = run_folder / CHECKPOINTS / f"step-{step:08d}"
    record = read_record(folder)
    if "header" not in record:
        raise NothingToCheck(f"{folder.name} was written by a program that kept no settings in it")
    header = header_of(record["header"])
    version = record["policy_version"]
    segments = segments_since(find_segments(run_folder / SPOOL, header.run_id), step)
    work = read_segments(segments)
    if work is None:
        raise NothingToCheck(f"{folder.name} has no segment in {SPOOL}/")
    work = work.beyond(version, IdSet(record["buffer"]["consumed_group_ids"]))
    groups = _trained_next(work, version, record["max_staleness"])
    if not groups or version + 1 not in work.issued:
        raise NothingToCheck(f"{folder.name} has no finished step after it in {SPOOL}/")
    return RecordedStep(
        step=step,
        policy_version=version,
        header=header,
        seed=record["seed"],
        weights_dtype=record["weights_dtype"],
        platform=record["platform"],
        devices=record["devices"],
        groups=groups,
        digest=work.issued[version + 1],
    )


def _trained_next(work: OpenWork, policy_version: int, max_staleness: int) -> tuple[Group, ...]:
    """The groups that the first update with something to train on was trained on."""

    def fresh(group_ids: Sequence[str]) -> tuple[Group, ...]:
        groups = [work.groups[group_id] for group_id in group_ids if group_id in work.groups]
        return tuple(g for g in groups if policy_version - g.policy_version <= max_staleness)

    made = [fresh(u.group_ids) for u in work.updates if u.policy_version == policy_version + 1]
    return next((groups for groups in made if groups), ())
