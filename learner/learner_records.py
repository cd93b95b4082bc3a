"""What the learner reports to the driver: plain records without arrays."""

import dataclasses
from typing import Any

from learner.durable.journal import Replayed
from learner.durable.saved import Saved
from learner.durable.segment_file import OpenWork
from services.process.activity import Activity
from services.process.process_memory import ProcessMemory
from services.trajectories.buffer_records import BufferCounts
from services.trajectories.group_report import GroupReport, report_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerInfo:
    """Where and on what a learner runs that serves."""

    name: str
    host: str
    pid: int
    devices: str
    """Such as `8 x NVIDIA H100`."""
    address: str
    """That workers dial."""
    sees_output_folder: bool
    """Whether the run's folder is there on its host."""
    clock_s: float
    """Its monotonic clock while it answered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedUpdate:
    """An update that had begun and is in no checkpoint."""

    policy_version: int
    """Which it makes, unless nothing is left to train on."""
    group_ids: list[str]
    dropped_ids: list[str]
    digest: str | None
    """Issued for that version then; None if the learner did not come so far, or made none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """Where a resumed run stands."""

    step: int
    """Of the checkpoint; 0 where there is none yet."""
    policy_version: int
    driver_state: dict[str, Any] | None
    """As it was saved; None where there is no checkpoint yet."""
    skipped: list[str]
    """Incomplete or damaged checkpoints that were passed over, with the reason."""
    set_aside: list[str]
    """Why accepted groups cannot train: they are in `rejected/unfit.jsonl`, and train nothing."""
    replay: list[RecordedUpdate]
    """To be asked of `update` again, in this order, before anything else."""
    waiting: list[GroupReport]
    """Accepted groups that no update in `replay` uses or drops, in order of arrival."""
    issued: dict[int, str]
    """Digest by policy version, as far as they were issued before."""
    repaired: str
    """What was cut off the end of the record, where a crash had left half an entry."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What one optimiser step came to."""

    policy_version: int
    """The learner's now; as before where there was nothing to train on."""
    digest: str
    """Of that version; empty while its publication is still on its way, as it is unless this
    update was made again."""
    metrics: dict[str, float]
    outcomes: dict[str, str]
    """Ledger state of every group that was asked for, by group_id, and of the disowned."""
    replayed: Replayed | None
    """For an update that was made again: whether the version has the digest it had. None for any
    other, and where the version was never issued."""
    disowned: list[str]
    """Groups that were given up, since they rest on a version that came out different."""
    saved: list[Saved] = dataclasses.field(default_factory=list)
    """Checkpoints that ended since the last report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerHealth:
    """How the learner is, without waiting for its work."""

    problem: str
    """What keeps it from going on, such as a full disk; empty where nothing does."""
    doing: str
    """The method at work, or `idle`."""
    policy_version: int
    issued_version: int
    """Newest that workers can have; -1 before the first."""
    counts: BufferCounts
    memory: ProcessMemory
    activity: Activity
    """Of the method at work, or of the publication while none is."""
    saving: int | None = None
    """Step of the checkpoint that is being written in the background; None where none is."""


def restored_at(
    step: int,
    policy_version: int,
    work: OpenWork,
    *,
    driver_state: dict[str, Any] | None,
    skipped: list[str],
    repaired: str,
    set_aside: list[str],
) -> Restored:
    """What the driver gets of a learner that goes on from a checkpoint.

    Args:
        work: what was recorded since.
        driver_state, skipped, repaired, set_aside: as in `Restored`.
    """
    maker = {update.policy_version: update for update in work.updates}  # the last one of each
    in_updates = {g for update in work.updates for g in (*update.group_ids, *update.dropped_ids)}
    return Restored(
        step=step,
        policy_version=policy_version,
        driver_state=driver_state,
        skipped=skipped,
        set_aside=set_aside,
        replay=[
            RecordedUpdate(
                policy_version=update.policy_version,
                group_ids=list(update.group_ids),
                dropped_ids=list(update.dropped_ids),
                digest=work.issued.get(update.policy_version)
                if maker[update.policy_version] is update
                else None,
            )
            for update in work.updates
        ],
        waiting=[report_of(g) for name, g in work.groups.items() if name not in in_updates],
        issued=dict(work.issued),
        repaired=repaired,
    )
