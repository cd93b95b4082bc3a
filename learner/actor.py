"""The shell of the learner: serves weights, collects groups, runs the core.

A plain class, so that it runs in a Ray actor (driver/supervisor.py) or in any other process. It
moves data and decides nothing. Its methods may be called from several threads: those that work
wait for each other, and those that only report (`take_timing`, `reports`, `counts`, `health`)
answer while one of them runs.
"""

import contextlib
import gc
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from learner.core import LearnerCore
from learner.durable.certificate import check_certificate, make_certificate
from learner.durable.checkpoint import CheckpointFolder, NoCompleteCheckpoint, RestoredCheckpoint
from learner.durable.journal import Begun, Journal
from learner.durable.rejected_groups import write_rejected
from learner.durable.rollout_file import RolloutRecorder, plain_header
from learner.durable.segment_file import NOTHING_OPEN
from learner.learner_records import LearnerHealth, LearnerInfo, Restored, UpdateReport, books_of
from learner.learner_spec import LearnerSpec, reachable_host, rollout_header
from learner.publish.publisher import Publisher, PublishFailed
from learner.publish.snapshot import Snapshot
from models.device_memory import device_memory
from models.files.checkpoint import load_model, save_model
from models.platform import require_platform
from models.tokenizer import load_tokenizer
from services.process import failpoints, stacks
from services.process.phase_clock import PhaseClock
from services.process.process_memory import process_memory
from services.process.span_log import StepTiming
from services.trajectories.group_report import GroupReport
from services.trajectories.id_set import PlainIds
from services.trajectories.service import trajectory_service
from services.weights.service import weight_service
from services.weights.store import WeightStore
from services.wire.messages import Group, WeightManifest
from services.wire.server import Server

SPOOL = "spool"
"""Folder of the journal, beside that of the checkpoints."""
PUBLISH_S = 600.0
"""How long one publication may take."""
NOTHING_USED: dict[str, PlainIds] = {"consumed_group_ids": []}


class LearnerActor:
    """Owns the learner core, the group buffer, the weight store and the server in front."""

    def __init__(
        self,
        spec: LearnerSpec,
        share: Callable[[Snapshot, WeightManifest], None] | None = None,
    ):
        """Args:
        share: gets every published version for a worker in this process, the only one.
        """
        failpoints.install(spec.failpoints)
        folder = pathlib.Path(spec.checkpoint_folder).parent
        stacks.register(folder, "learner")
        self._spec = spec
        self._work = threading.Lock()
        self._doing = "idle"
        self._clock = PhaseClock()
        self._devices = require_platform(spec.platform)
        self._tokenizer = load_tokenizer(
            spec.model_path,
            tokenizer=spec.tokenizer,
            chat_template=spec.chat_template,
            stop_tokens=spec.stop_tokens,
        )
        loaded = load_model(spec.model_path)
        self._model = loaded.config
        self._valid_vocab = min(self._tokenizer.vocab_size, loaded.config.vocab_size)
        self._header = rollout_header(spec, loaded, self._valid_vocab)
        self._core = LearnerCore(self._header, loaded.config, loaded.params, devices=self._devices)
        self._rejected = folder / "rejected"
        self._recorder = None
        if spec.rollouts_file is not None:
            self._recorder = RolloutRecorder(pathlib.Path(spec.rollouts_file), self._header)
        self._checkpoints = CheckpointFolder(spec.checkpoint_folder, keep=spec.keep_checkpoints)
        self._weights = WeightStore(
            spec.run_id, keep_versions=spec.keep_versions, deltas=share is None
        )
        self._journal = Journal(
            folder / SPOOL,
            spec.run_id,
            capacity_groups=spec.buffer_groups,
            capacity_bytes=spec.buffer_bytes,
            max_staleness=spec.max_staleness,
        )
        self._publisher = Publisher(
            lambda: self._core.snapshot(spec.weights_dtype, self._clock, probe=spec.canary),
            self._weights,
            self._issue,
            timeout_s=PUBLISH_S,
            share=share,
        )
        self._server = Server(
            spec.credentials,
            [
                weight_service(self._weights, chunk_bytes=spec.chunk_bytes),
                trajectory_service(self._journal.buffer),
            ],
            host=spec.bind_host,
            port=spec.port,
        )
        self._idle = contextlib.ExitStack()
        # What is here now stays; without it a look for garbage after an update takes a millisecond.
        gc.collect()
        gc.freeze()
        self._clock.take_timing()  # time before this belongs to no step
        self._idle.enter_context(self._clock.phase("idle"))

    def describe(self) -> LearnerInfo:
        """Says that the learner serves, and where and on what it runs."""
        return LearnerInfo(
            name="learner",
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=f"{len(self._devices)} x {self._devices[0].device_kind}",
            address=f"{reachable_host(self._spec)}:{self._server.port}",
            sees_output_folder=pathlib.Path(self._spec.checkpoint_folder).parent.is_dir(),
            clock_s=time.monotonic(),
        )

    def restore(self) -> Restored | None:
        """Goes on from the newest complete checkpoint and what was accepted since.

        Without a checkpoint it goes on from the start of the run, with what was accepted then;
        None where there is not even that.

        Raises:
            ValueError: if what is there cannot be trusted, or is of another run, model or seed.
        """
        with self._working("restore"), self._clock.phase("checkpoint"):
            found, skipped = self._find_checkpoint()
            if found is not None:
                self._core.resume(found.state, policy_version=found.record["policy_version"])
                self._check_certificate(found)
            step = found.step if found is not None else 0
            used = found.record["buffer"] if found is not None else NOTHING_USED
            work = self._journal.resume(step, self._core.policy_version, used)
            if found is None and work is None:
                return None
            return Restored(
                step=step,
                policy_version=self._core.policy_version,
                driver_state=found.record["driver"] if found is not None else None,
                skipped=skipped,
                **books_of(work or NOTHING_OPEN),
            )

    def publish(self) -> int:
        """Offers the current policy to the workers, who can have it on return; its version."""
        with self._working("publish"), self._clock.phase("publish"):
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
            dropped_ids: groups in the buffer that nobody will ask for.
            timeout_s: bound of the wait for groups that are still on their way.

        Raises:
            TimeoutError: naming the groups that did not arrive; nothing has changed.
            OSError: if the update could not be written down; nothing has changed.
            PublishFailed: if a version before did not reach the workers.
        """
        with self._working("update"):
            self._publisher.raise_failure()
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
            return self._report(begun, group_ids, metrics, outcomes)

    def save(self, step: int, driver_state: dict[str, Any]) -> str:
        """Writes a complete checkpoint, then drops older ones; returns its folder.

        Raises:
            CheckpointFailed: if it cannot be written, as on a full disk; those before it and what
                was accepted since are untouched.
        """
        with self._working("save"), self._clock.phase("checkpoint"):
            record = {
                "policy_version": self._core.policy_version,
                "seed": self._spec.seed,
                "buffer": self._journal.buffer.state(),
                "driver": driver_state,
                "header": plain_header(self._header),
                "weights_dtype": self._spec.weights_dtype,
                "max_staleness": self._spec.max_staleness,
                "platform": self._spec.platform,
                "devices": len(self._devices),
            }
            certificate = make_certificate(
                self._core.state, seed=self._spec.seed, driver_state=driver_state
            )
            folder = self._checkpoints.save(step, self._core.state, record, certificate)
            self._clock.mark(f"checkpoint {step}")
            self._journal.rotate(
                step, self._core.policy_version, min(self._checkpoints.complete_steps())
            )
            return str(folder)

    def export(self, folder: str) -> None:
        """Writes the current policy as a Hugging Face folder."""
        with self._working("export"), self._clock.phase("checkpoint"):
            named = self._core.named_weights("bfloat16")
            save_model(pathlib.Path(folder), self._model, named, self._tokenizer)

    def take_timing(self, until_s: float | None = None) -> StepTiming:
        """What the learner did since the previous timing; as `PhaseClock.take_timing`."""
        return self._clock.take_timing(until_s)

    def reports(self, group_ids: Sequence[str] | None = None) -> list[GroupReport]:
        """The accepted groups that wait, in order of arrival: those asked for, or all."""
        return self._journal.buffer.reports(group_ids)

    def digest(self, policy_version: int, timeout_s: float) -> str:
        """The digest under which a version was issued, once it is there for the workers.

        Raises:
            TimeoutError: saying what the publication is at.
            PublishFailed: if it did not succeed.
        """
        self._publisher.wait(policy_version, timeout_s)
        return self._journal.digest_of(policy_version)

    def health(self) -> LearnerHealth:
        """How the learner is; a background failure shows here first."""
        problem = self._journal.problem
        try:
            self._publisher.raise_failure()
        except PublishFailed as error:
            problem = str(error)
        return LearnerHealth(
            problem=problem,
            doing=self._doing,
            policy_version=self._core.policy_version,
            issued_version=self._journal.buffer.current_version,
            counts=self._journal.buffer.counts(),
            memory=process_memory(device_memory(self._devices)),
        )

    def close(self) -> None:
        """Stops the server; calls that are in progress get a moment to end."""
        try:
            self._publisher.close()
        finally:
            self._server.stop(grace_s=2.0)
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
        )

    @contextlib.contextmanager
    def _working(self, doing: str):
        """One thread at a time; not idle inside; idle again after, also when the work failed."""
        with self._work:
            self._doing = doing
            self._idle.close()
            try:
                yield
            finally:
                self._idle.enter_context(self._clock.phase("idle"))
                self._doing = "idle"
