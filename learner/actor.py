"""The shell of the learner: serves weights, collects groups, runs the core.

A plain class, so that it runs in a Ray actor (driver/supervisor.py) or in any other process. It
moves data and decides nothing.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.checkpoint import CheckpointFolder
from learner.config import AlgorithmConfig, LearnerConfig
from learner.core import LearnerCore
from learner.rollout_file import RolloutHeader, RolloutRecorder
from models.checkpoint import LoadedModel, load_model, save_model
from models.platform import require_platform
from models.tokenizer import load_tokenizer
from services.group_buffer import GroupBuffer
from services.messages import FinishReason, Group
from services.phase_clock import PhaseClock
from services.server import Server
from services.tls import Credentials
from services.weight_store import WeightStore

ANY_HOST = ("0.0.0.0", "::")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """Everything the learner needs to start; plain values, so that it can travel."""

    run_id: str
    seed: int
    platform: str
    model_path: str
    tokenizer: str | None
    chat_template: str | None
    stop_tokens: tuple[str, ...]
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    total_steps: int
    temperature: float
    max_completion_tokens: int
    max_staleness: int
    weights_dtype: str
    chunk_bytes: int
    keep_versions: int
    buffer_groups: int
    """Groups that may wait; more are refused until some are taken."""
    buffer_bytes: int
    bind_host: str
    port: int
    """0 takes a free one."""
    driver_host: str
    """Address of the driver: on a host with several, the way there tells which one is ours."""
    credentials: Credentials
    checkpoint_folder: str
    keep_checkpoints: int
    rollouts_file: str | None = None
    """Where the groups of every update are recorded, if anywhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """Where a resumed run stands."""

    step: int
    policy_version: int
    driver_state: dict[str, Any]
    skipped: list[str]
    """Incomplete or damaged checkpoints that were passed over, with the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What one optimiser step came to."""

    policy_version: int
    metrics: dict[str, float]
    outcomes: dict[str, str]
    """Ledger state of every group that was asked for, by group_id."""


def plain_group(group: Group) -> dict[str, Any]:
    """A group as JSON values; a number that is not finite becomes text."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, np.ndarray):
            return plain(value.tolist())
        if isinstance(value, FinishReason):
            return value.value
        if isinstance(value, float) and not math.isfinite(value):
            return repr(value)
        return value

    return plain(dataclasses.asdict(group))


class LearnerActor:
    """Owns the learner core, the group buffer, the weight store and the server in front."""

    def __init__(self, spec: LearnerSpec):
        self._spec = spec
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
        self._core = LearnerCore(
            algorithm=spec.algorithm,
            learner=spec.learner,
            model_config=loaded.config,
            params=loaded.params,
            total_steps=spec.total_steps,
            temperature=spec.temperature,
            valid_vocab=self._valid_vocab,
            max_completion_tokens=spec.max_completion_tokens,
            devices=self._devices,
        )
        self._recorder = self._make_recorder(loaded)
        self._checkpoints = CheckpointFolder(spec.checkpoint_folder, keep=spec.keep_checkpoints)
        self._weights = WeightStore(spec.run_id, keep_versions=spec.keep_versions)
        self._buffer = GroupBuffer(
            spec.run_id,
            capacity_groups=spec.buffer_groups,
            capacity_bytes=spec.buffer_bytes,
            max_staleness=spec.max_staleness,
        )
        self._server = Server(
            spec.credentials,
            weight_store=self._weights,
            group_buffer=self._buffer,
            host=spec.bind_host,
            port=spec.port,
            chunk_bytes=spec.chunk_bytes,
        )
        self._idle = contextlib.ExitStack()
        self._idle.enter_context(self._clock.phase("idle"))

    def describe(self) -> dict[str, Any]:
        """Says that the learner serves, and where and on what it runs."""
        return {
            "name": "learner",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "devices": f"{len(self._devices)} x {self._devices[0].device_kind}",
            "address": f"{self._reachable_host()}:{self._server.port}",
            "sees_output_folder": pathlib.Path(self._spec.checkpoint_folder).parent.is_dir(),
        }

    def _reachable_host(self) -> str:
        """What workers dial: the address listened on, or ours on the way to the driver."""
        if self._spec.bind_host not in ANY_HOST:
            return self._spec.bind_host
        family = socket.AF_INET6 if ":" in self._spec.driver_host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect((self._spec.driver_host, 9))
            host = unsent.getsockname()[0]
        return f"[{host}]" if ":" in host else host

    def restore(self) -> Restored | None:
        """Goes on from the newest complete checkpoint; None where there is none."""
        with self._working():
            found = self._checkpoints.restore(self._core.abstract_state)
            if found is None:
                return None
            self._core.resume(found.state, policy_version=found.record["policy_version"])
            self._buffer.restore(found.record["buffer"])
            return Restored(
                step=found.step,
                policy_version=found.record["policy_version"],
                driver_state=found.record["driver"],
                skipped=found.skipped,
            )

    def publish(self) -> int:
        """Offers the current policy to the workers; returns its version."""
        with self._working(), self._clock.phase("publish"):
            version = self._core.policy_version
            named = self._core.named_weights(self._spec.weights_dtype)
            manifest = self._weights.publish(version, named)
            self._buffer.issue(version, manifest.digest)
            return version

    def update(
        self, group_ids: Sequence[str], dropped_ids: Sequence[str], timeout_s: float
    ) -> UpdateReport:
        """Trains on these groups and publishes the next version.

        Args:
            group_ids: groups to wait for, in the order they are to be packed.
            dropped_ids: groups in the buffer that nobody will ask for.
            timeout_s: bound of the wait for groups that are still on their way.
        """
        self._buffer.forget(dropped_ids)
        outcomes: dict[str, str] = {}
        metrics: dict[str, float] = {"train/update_skipped": 1.0}
        with self._working():
            with self._clock.phase("queue_wait"):
                taken = self._buffer.take(group_ids, timeout_s)
            if taken.groups:
                self._record(taken.groups)
                metrics = self._core.update(taken.groups, self._clock)
                outcomes |= self._core.outcomes
                if metrics["train/update_skipped"]:
                    self._keep_rejected()
        outcomes |= {group.group_id: "dropped_stale" for group in taken.dropped_stale}
        counts = self._buffer.counts()
        metrics |= {
            f"groups/{name}": float(getattr(counts, name))
            for name in ("duplicate", "stale", "malformed", "unknown_receipt", "dropped_stale")
        }
        return UpdateReport(policy_version=self.publish(), metrics=metrics, outcomes=outcomes)

    def save(self, step: int, driver_state: dict[str, Any]) -> str:
        """Writes a complete checkpoint, then drops older ones; returns its folder."""
        with self._working(), self._clock.phase("checkpoint"):
            record = {
                "policy_version": self._core.policy_version,
                "seed": self._spec.seed,
                "buffer": self._buffer.state(),
                "driver": driver_state,
            }
            return str(self._checkpoints.save(step, self._core.state, record))

    def export(self, folder: str) -> None:
        """Writes the current policy as a Hugging Face folder."""
        with self._working(), self._clock.phase("checkpoint"):
            named = self._core.named_weights("bfloat16")
            save_model(pathlib.Path(folder), self._model, named, self._tokenizer)

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call; they add up to the time between."""
        return self._clock.lap()

    def close(self) -> None:
        """Stops the server; calls that are in progress get a moment to end."""
        self._server.stop(grace_s=2.0)

    def _keep_rejected(self) -> None:
        """Writes the groups of an update that was not finite to a file, for a look."""
        if not self._core.rejected:
            return
        folder = pathlib.Path(self._spec.checkpoint_folder).parent / "rejected"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"version-{self._core.policy_version:08d}.jsonl"
        with path.open("w") as file:
            for group in self._core.rejected:
                file.write(json.dumps(plain_group(group)) + "\n")

    def _make_recorder(self, loaded: LoadedModel) -> RolloutRecorder | None:
        spec = self._spec
        if spec.rollouts_file is None:
            return None
        header = RolloutHeader(
            run_id=spec.run_id,
            seed=spec.seed,
            model_path=spec.model_path,
            model_folder=str(loaded.folder.resolve()) if loaded.folder else None,
            algorithm=spec.algorithm,
            learner=spec.learner,
            temperature=spec.temperature,
            valid_vocab=self._valid_vocab,
            max_completion_tokens=spec.max_completion_tokens,
            total_steps=spec.total_steps,
        )
        return RolloutRecorder(pathlib.Path(spec.rollouts_file), header)

    def _record(self, groups: Sequence[Group]) -> None:
        """Writes the groups down before they train, so that a failed update can be repeated."""
        if self._recorder is not None:
            with self._clock.phase("serialise"):
                self._recorder.append(self._core.policy_version, groups)

    @contextlib.contextmanager
    def _working(self):
        """Not idle inside; idle again after, also when the work failed."""
        self._idle.close()
        try:
            yield
        finally:
            self._idle.enter_context(self._clock.phase("idle"))
