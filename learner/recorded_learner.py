"""The learner without its server: makes each step last, so that another learner can go on from it.

Accepted groups and updates go to a journal before they count, and every step can be saved as a
checkpoint. A learner that restores both makes the same versions again.
"""

import contextlib
import functools
import gc
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from learner.core import LearnerCore
from learner.durable.certificate import check_base, check_certificate, make_certificate
from learner.durable.checkpoint import (
    CheckpointFolder,
    NoCompleteCheckpoint,
    RestoredCheckpoint,
    SavedCheckpoint,
)
from learner.durable.checkpoint_writer import CheckpointJob, CheckpointWriter
from learner.durable.journal import Begun, Journal
from learner.durable.rejected_groups import write_rejected, write_unfit
from learner.durable.rollout_file import RolloutHeader, RolloutRecorder, plain_header
from learner.durable.saved import Saved
from learner.durable.segment_file import NOTHING_OPEN
from learner.learner_records import Restored, UpdateReport, restored_at
from learner.learner_spec import LearnerSpec
from learner.publish.policy_export import PolicyExport, merged_into_model
from learner.publish.publisher import Publisher, PublishFailed
from learner.publish.snapshot import Snapshot
from learner.teacher import load_teacher
from models.files.carried_files import read_carried
from models.files.checkpoint import LoadedModel, load_model, to_named
from models.files.peft_folder import write_peft
from models.load_tokenizer import load_tokenizer
from services.process.phase_clock import PhaseClock
from services.trajectories.group_buffer import GroupBuffer
from services.trajectories.group_check import GroupRules
from services.trajectories.id_set import PlainIds
from services.weights.digest import tree_digest
from services.weights.store import WeightStore
from services.wire.messages import Group, WeightManifest

SPOOL = "spool"
"""Folder of the journal, beside that of the checkpoints."""
PUBLISH_S = 600.0
"""How long one publication may take."""
NOTHING_USED: dict[str, PlainIds] = {"consumed_group_ids": []}


class RecordedLearner:
    """Owns the learner core, the journal with the group buffer, and the versions of the policy.

    `restore`, `publish`, `update`, `save`, `begin_save`, `end_saving` and `export` are for one
    thread at a time; the other methods may be called meanwhile.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        devices: Sequence[jax.Device],
        clock: PhaseClock,
        share: Callable[[Snapshot, WeightManifest], None] | None = None,
    ):
        """Args:
        clock: gets the seconds of each phase.
        share: gets every published version for a worker in this process, the only one.
        """
        folder = pathlib.Path(spec.checkpoint_folder).parent
        self._spec = spec
        self._clock = clock
        self._devices = devices
        tokenizer = load_tokenizer(
            spec.model_path,
            tokenizer=spec.tokenizer,
            chat_template=spec.chat_template,
            stop_tokens=spec.stop_tokens,
        )
        loaded = load_model(spec.model_path)
        carried = read_carried(
            spec.model_path, tokenizer=spec.tokenizer, chat_template=spec.chat_template
        )
        self._export = PolicyExport.of(
            loaded.config, loaded.stored_dtypes, tokenizer, carried, spec.export_dtype
        )
        valid_vocab = min(tokenizer.vocab_size, loaded.config.vocab_size)
        self._header = _rollout_header(spec, loaded, valid_vocab)
        teacher = load_teacher(spec.algorithm, loaded.config, digest=spec.teacher_digest)
        self._core = LearnerCore(
            self._header, loaded.config, loaded.params, devices=devices, teacher=teacher
        )
        self._base_digest = None
        if spec.learner.lora is not None:
            self._base_digest = tree_digest(to_named(loaded.params, loaded.config))[1]
        self._rejected = folder / "rejected"
        self._saved = 0
        self._recorder = None
        if spec.rollouts_file is not None:
            self._recorder = RolloutRecorder(pathlib.Path(spec.rollouts_file), self._header)
        self._checkpoints = CheckpointFolder(spec.checkpoint_folder, keep=spec.keep_checkpoints)
        self._writer = CheckpointWriter(
            self._checkpoints, on_certified=self._certified, timeout_s=spec.checkpoint_wait_s
        )
        self.weights = WeightStore(
            spec.run_id, keep_versions=spec.keep_versions, deltas=share is None
        )
        """The published versions, for a server."""
        self._journal = Journal(
            folder / SPOOL,
            GroupRules(
                run_id=spec.run_id,
                group_size=spec.group_size,
                vocab_size=valid_vocab,
                max_prompt_tokens=spec.max_prompt_tokens,
                max_completion_tokens=spec.max_completion_tokens,
                order=spec.order,
            ),
            capacity_groups=spec.buffer_groups,
            capacity_bytes=spec.buffer_bytes,
            max_staleness=spec.max_staleness,
            check_trainable=self._core.check_trainable,
        )
        self._publisher = Publisher(
            lambda: self._core.snapshot(spec.weights_dtype, clock, probe=spec.canary),
            self.weights,
            self._issue,
            timeout_s=PUBLISH_S,
            share=share,
        )

    @property
    def buffer(self) -> GroupBuffer:
        """The accepted groups that wait, for a server."""
        return self._journal.buffer

    @property
    def policy_version(self) -> int:
        """The current one."""
        return self._core.policy_version

    @property
    def publishing(self) -> bool:
        """Whether a version is on its way to the workers, in a thread beside the update."""
        return self._publisher.busy

    @property
    def saving(self) -> int | None:
        """Step of the checkpoint that is being written in the background; None where none is."""
        return self._writer.writing

    @property
    def progress(self) -> dict[str, int]:
        """What was done since the start; for any thread."""
        return {
            "programs": self._core.programs_run,
            "versions": self._core.policy_version,
            "tensors published": self._publisher.tensors_copied,
            "checkpoints": self._saved,
        }

    @property
    def problem(self) -> str:
        """What keeps it from going on, such as a full disk; empty where nothing does."""
        try:
            self._publisher.raise_failure()
        except PublishFailed as error:
            return str(error)
        return self._journal.problem

    def restore(self) -> Restored | None:
        """Goes on from the newest complete checkpoint and what was accepted since.

        Without a checkpoint it goes on from the start of the run, with what was accepted then;
        None where there is not even that.

        Raises:
            ValueError: if what is there cannot be trusted, or is of another run, model or seed.
            SpoolFailed: if another learner of the run is still there.
        """
        with self._clock.phase("checkpoint"):
            self._journal.claim()  # until then the learner before may still complete a checkpoint
            found, skipped = self._find_checkpoint()
            if found is not None:
                check_base(found.record.get("base_digest"), self._base_digest, found.step)
                self._core.resume(found.state, policy_version=found.record["policy_version"])
                self._check_certificate(found)
            step = found.step if found is not None else 0
            used = found.record["buffer"] if found is not None else NOTHING_USED
            work = self._journal.resume(step, self._core.policy_version, used)
            if found is None and work is None:
                return None
            unfit = self._journal.set_aside
            write_unfit(self._rejected, [(one.group, one.reason) for one in unfit])
            return restored_at(
                step,
                self._core.policy_version,
                work or NOTHING_OPEN,
                driver_state=found.record["driver"] if found is not None else None,
                skipped=skipped,
                repaired=self._journal.repaired,
                set_aside=[one.reason for one in unfit],
            )

    def publish(self) -> int:
        """Offers the current policy to the workers, who can have it on return; its version."""
        with self._clock.phase("publish"):
            self._journal.start()
            version = self._core.policy_version
            self._publisher.submit(version)
            self._publisher.wait(version, PUBLISH_S)
            return version

    def update(
        self, group_ids: Sequence[str], dropped_ids: Sequence[str], timeout_s: float
    ) -> UpdateReport:
        """Trains on these groups and sends the next version on its way to the workers.

        Args:
            group_ids: groups to wait for, in the order they are to be packed; none where a step
                has nothing to train on. It is written down all the same, and made again in its
                place after a restart.
            dropped_ids: groups in the buffer that no update will ask for.
            timeout_s: bound of the wait for groups that are still on their way.

        Raises:
            TimeoutError: naming the groups that did not arrive; nothing has changed.
            OSError: if the update could not be written down; nothing has changed.
            PublishFailed: if a version before did not reach the workers.
            CheckpointBroken: if a checkpoint in the background failed for another reason than the
                disk.
        """
        self._publisher.raise_failure()
        self._writer.raise_failure()
        version = self._core.policy_version
        with self._clock.phase("queue_wait"):
            begun = self._journal.begin(version + 1, group_ids, dropped_ids, timeout_s)
        outcomes: dict[str, str] = {}
        metrics: dict[str, float] = {"train/update_skipped": 1.0}
        if begun.taken.groups:
            metrics = self._train(begun.taken.groups)
            self._clock.mark(f"version {self._core.policy_version}")
            with self._clock.phase("optimizer"):
                gc.collect()  # left alone, cycles hold arrays of an update for long
            outcomes |= self._core.outcomes
            self._journal.buffer.advance(self._core.policy_version)
            with self._clock.phase("publish"):
                self._publisher.submit(self._core.policy_version)
                if begun.is_replay:
                    self._publisher.wait(self._core.policy_version, PUBLISH_S)
        outcomes |= {group.group_id: "dropped_stale" for group in begun.taken.dropped_stale}
        outcomes |= dict.fromkeys(begun.unfit_ids, "dropped_error")
        return self._report(begun, group_ids, metrics, outcomes)

    def save(
        self,
        step: int,
        driver_state: dict[str, Any],
        scores: Mapping[int, float | None] | None = None,
    ) -> list[Saved]:
        """Writes a complete checkpoint, after the one in the background, then drops older ones.

        Args:
            scores: as `CheckpointFolder.save`.

        Returns:
            Those that ended since the last report; the last is this one. Where it could not be
            written, as on a full disk, those before it and what was accepted since are untouched.

        Raises:
            CheckpointBroken: if one before failed for another reason than the disk; this one is
                written first.
            TimeoutError: naming the one before, which is still being written.
        """
        with self._clock.phase("checkpoint"):
            self._writer.write(lambda: self._begin_checkpoint(step, driver_state, scores or {}))
            return self._writer.take_ended()

    def begin_save(
        self,
        step: int,
        driver_state: dict[str, Any],
        scores: Mapping[int, float | None] | None = None,
    ) -> None:
        """Copies the state to the host, and has a checkpoint of it written in the background.

        It counts once it is complete, which a later report says: that of `update`,
        of `save`, `end_saving` or `close`. Waits for the one before, if that is still being
        written.

        Args:
            scores: as `CheckpointFolder.save`.

        Raises:
            CheckpointBroken: if one before failed for another reason than the disk.
            TimeoutError: as `save`.
        """
        with self._clock.phase("checkpoint"):
            self._writer.submit(lambda: self._begin_checkpoint(step, driver_state, scores or {}))

    def end_saving(self) -> list[Saved]:
        """Waits for the checkpoint in the background; those that ended since the last report.

        Raises:
            TimeoutError: as `save`.
        """
        with self._clock.phase("checkpoint"):
            self._writer.wait()
            return self._writer.take_ended()

    def _begin_checkpoint(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> CheckpointJob:
        """Begins the segment of a checkpoint; what that is to hold."""
        version = self._core.policy_version
        record = {
            "policy_version": version,
            "seed": self._spec.seed,
            "buffer": self._journal.buffer.state(),
            "driver": driver_state,
            "header": plain_header(self._header),
            "weights_dtype": self._spec.weights_dtype,
            "max_staleness": self._spec.max_staleness,
            "platform": self._spec.platform,
            "devices": len(self._devices),
            "base_digest": self._base_digest,
        }
        certify = functools.partial(
            make_certificate, seed=self._spec.seed, driver_state=driver_state
        )
        self._journal.rotate(step, version)
        return CheckpointJob(
            step=step, state=self._core.state, record=record, certify=certify, scores=scores
        )

    def _certified(self, step: int, saved: SavedCheckpoint) -> list[str]:
        """What a checkpoint that is complete lets go; in the thread that wrote it."""
        self._saved += 1
        self._clock.mark(f"checkpoint {step}")
        return self._journal.prune(saved.oldest_step)

    def export(self, folder: str) -> str:
        """Writes the current policy as a Hugging Face folder: the model that came in, trained; an
        adapter is merged into it.

        Returns:
            The types of its tensors, such as `bfloat16`.
        """
        with self._clock.phase("checkpoint"):
            return self._export.write(pathlib.Path(folder), self._whole_weights())

    def _whole_weights(self) -> Mapping[str, np.ndarray]:
        """Of the current policy. The model under an adapter is read again: what the devices have of
        it may be rounded, and they need no room for a merged one.
        """
        if self._base_digest is None:
            return self._core.named_weights(self._export.narrowest)
        adapter = self._core.host_adapter()
        merged = merged_into_model(
            self._spec.model_path,
            adapter.params,
            adapter.shape,
            base_digest=self._base_digest,
            where="the adapter",
        )
        return to_named(merged, self._export.model)

    def export_adapter(self, folder: str) -> None:
        """Writes the adapter as PEFT has it, in float32.

        Raises:
            ValueError: if the model itself trains, or the folder holds something else.
        """
        with self._clock.phase("checkpoint"):
            adapter = self._core.host_adapter()
            path = pathlib.Path(folder)
            write_peft(path, adapter.params, adapter.shape, base_model=self._spec.model_path)

    def digest(self, policy_version: int, timeout_s: float) -> str:
        """The digest under which a version was issued, once it is there for the workers.

        Raises:
            TimeoutError: saying what the publication is at.
            PublishFailed: if it did not succeed.
        """
        self._publisher.wait(policy_version, timeout_s)
        return self._journal.digest_of(policy_version)

    def close(self) -> list[Saved]:
        """Ends the publication and the checkpoint that are under way, and closes the journal.

        Returns:
            The checkpoints that ended since the last report.

        Raises:
            CheckpointBroken: if one failed for another reason than the disk.
            TimeoutError: naming the publication or the checkpoint; while that is still being
                written, the journal stays claimed until this process ends.
        """
        with contextlib.ExitStack() as last:
            last.callback(self._release_journal)
            # Whether the publication failed is in `problem`, or in an earlier error.
            last.enter_context(contextlib.suppress(PublishFailed))
            last.callback(self._publisher.close)
            return self._writer.close()

    def _release_journal(self) -> None:
        """Lets another learner write, unless a checkpoint of this one may still get its name."""
        if self.saving is None:
            self._journal.close()

    def _issue(self, policy_version: int, digest: str) -> None:
        self._journal.issue(policy_version, digest)
        self._clock.mark(f"published {policy_version}")

    def _find_checkpoint(self) -> tuple[RestoredCheckpoint | None, list[str]]:
        """The newest complete checkpoint, and what was passed over.

        A run whose first checkpoint was cut goes on from its start, if the journal reaches back.
        """
        try:
            found = self._checkpoints.restore(self._core.abstract_state)
        except NoCompleteCheckpoint as error:
            if not self._journal.covers(0):
                raise
            return None, error.skipped
        return found, found.skipped if found is not None else []

    def _check_certificate(self, found: RestoredCheckpoint) -> None:
        if found.certificate is not None:
            now = make_certificate(
                self._core.state, seed=self._spec.seed, driver_state=found.record["driver"]
            )
            check_certificate(found.certificate, now, f"the checkpoint of step {found.step}")

    def _train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Makes the next policy version of the groups; keeps them where it was not finite."""
        version = self._core.policy_version
        with self._clock.phase("serialise"):
            if self._recorder is not None:
                self._recorder.append(version, groups)
        metrics = self._core.update(groups, self._clock)
        with self._clock.phase("serialise"):
            write_rejected(self._rejected, version + 1, self._core.rejected)
        return metrics

    def _report(
        self,
        begun: Begun,
        group_ids: Sequence[str],
        metrics: dict[str, float],
        outcomes: dict[str, str],
    ) -> UpdateReport:
        version = self._core.policy_version
        counts = self._journal.buffer.counts()
        metrics |= {
            f"groups/{name}": float(getattr(counts, name))
            for name in ("duplicate", "stale", "malformed", "unknown_receipt", "dropped_stale")
        }
        if (stats := self._publisher.last_stats) is not None:
            metrics |= {
                "publish/waited_s": stats.waited_s,
                "publish/copy_s": stats.copy_s,
                "publish/total_s": stats.total_s,
                "publish/gb_per_s": stats.gb_per_s,
            }
        replayed = None
        if begun.taken.groups and begun.is_replay:
            replayed = self._journal.replayed(version)
        elif self._journal.is_disowned(group_ids):
            replayed = "different"
        disowned = self._journal.take_disowned()
        return UpdateReport(
            policy_version=version,
            digest=self._journal.digest_of(version),
            metrics=metrics,
            outcomes=outcomes | dict.fromkeys(disowned, "dropped_error"),
            replayed=replayed,
            disowned=disowned,
            saved=self._writer.take_ended(),
        )


def _rollout_header(spec: LearnerSpec, loaded: LoadedModel, valid_vocab: int) -> RolloutHeader:
    """What another learner needs to train on this one's groups."""
    return RolloutHeader(
        run_id=spec.run_id,
        seed=spec.seed,
        model_path=spec.model_path,
        model_folder=str(loaded.folder.resolve()) if loaded.folder else None,
        algorithm=spec.algorithm,
        learner=spec.learner,
        temperature=spec.temperature,
        valid_vocab=valid_vocab,
        max_completion_tokens=spec.max_completion_tokens,
        total_steps=spec.total_steps,
        reward_weights=spec.reward_weights,
    )
