"""The shell of the learner: a `RecordedLearner`, the server in front of it, and its clock.

A plain class, so that it runs in a Ray actor (driver/fleet/launch.py) or in any other process. It
moves data and decides nothing. Its methods may be called from several threads: those that work
wait for each other, and those that only report (`take_timing`, `reports`, `digest`, `health`)
answer while one of them runs.
"""

import contextlib
import gc
import logging
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from learner.durable.saved import Saved
from learner.learner_records import LearnerHealth, LearnerInfo, Restored, UpdateReport
from learner.learner_spec import LearnerSpec, reachable_host
from learner.publish.snapshot import Snapshot
from models.device_memory import device_memory
from models.platform import require_platform
from services.process import failpoints, stacks
from services.process.activity import Activity
from services.process.driver_lease import DriverLease
from services.process.phase_clock import PhaseClock
from services.process.process_memory import process_memory
from services.process.span_log import StepTiming
from services.trajectories.group_report import GroupReport
from services.trajectories.service import trajectory_service
from services.weights.service import weight_service
from services.wire.host_port import join_address
from services.wire.messages import WeightManifest
from services.wire.server import PortUnavailable, Server, Service

log = logging.getLogger(__name__)


def serve(spec: LearnerSpec, services: Sequence[Service]) -> Server:
    """Listens on the port of the learner before, where that is free, else on the configured one.

    Raises:
        PortUnavailable: if the configured one is not free either.
    """
    if spec.earlier_port is not None and spec.earlier_port != spec.port:
        try:
            return Server(spec.credentials, services, host=spec.bind_host, port=spec.earlier_port)
        except PortUnavailable as error:
            log.warning("%s; workers are told of another port", error)
    return Server(spec.credentials, services, host=spec.bind_host, port=spec.port)


class LearnerActor:
    """Owns the learner of a run and its server."""

    def __init__(
        self,
        spec: LearnerSpec,
        share: Callable[[Snapshot, WeightManifest], None] | None = None,
    ):
        """Args:
        share: gets every published version for a worker in this process, the only one.
        """
        # Here, and not where the driver imports this class: it reads and writes no checkpoints.
        from learner.recorded_learner import RecordedLearner

        failpoints.install(spec.failpoints)
        self._folder = pathlib.Path(spec.checkpoint_folder).parent
        stacks.register(self._folder, "learner")
        self._work = threading.Lock()
        self._doing = "idle"
        self._clock = PhaseClock()
        self._devices = require_platform(spec.platform)
        self._learner = RecordedLearner(spec, self._devices, self._clock, share)
        self._server = serve(
            spec,
            [
                weight_service(self._learner.weights, chunk_bytes=spec.chunk_bytes),
                trajectory_service(self._learner.buffer),
            ],
        )
        self._address = join_address(reachable_host(spec), self._server.port)
        self._idle = contextlib.ExitStack()
        # What is here now stays; without it a look for garbage after an update takes a millisecond.
        gc.collect()
        gc.freeze()
        self._lease = None
        if spec.driver_lease_s is not None:
            self._lease = DriverLease("the learner", spec.driver_lease_s)
            self._lease.start()
        self._clock.take_timing()  # time before this belongs to no step
        self._idle.enter_context(self._clock.phase("idle"))

    def describe(self) -> LearnerInfo:
        """Says that the learner serves, and where and on what it runs."""
        return LearnerInfo(
            name="learner",
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=f"{len(self._devices)} x {self._devices[0].device_kind}",
            address=self._address,
            sees_output_folder=self._folder.is_dir(),
            clock_s=time.monotonic(),
        )

    def restore(self) -> Restored | None:
        """As `RecordedLearner.restore`."""
        with self._working("restore"):
            return self._learner.restore()

    def publish(self) -> int:
        """As `RecordedLearner.publish`."""
        with self._working("publish"):
            return self._learner.publish()

    def update(
        self, group_ids: Sequence[str], dropped_ids: Sequence[str], timeout_s: float
    ) -> UpdateReport:
        """As `RecordedLearner.update`."""
        with self._working("update"):
            return self._learner.update(group_ids, dropped_ids, timeout_s)

    def save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> list[Saved]:
        """As `RecordedLearner.save`."""
        with self._working("save"):
            return self._learner.save(step, driver_state, scores)

    def begin_save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> None:
        """As `RecordedLearner.begin_save`."""
        with self._working("save"):
            self._learner.begin_save(step, driver_state, scores)

    def end_saving(self) -> list[Saved]:
        """As `RecordedLearner.end_saving`."""
        with self._working("save"):
            return self._learner.end_saving()

    def export(self, folder: str) -> str:
        """As `RecordedLearner.export`."""
        with self._working("export"):
            return self._learner.export(folder)

    def export_adapter(self, folder: str) -> None:
        """As `RecordedLearner.export_adapter`."""
        with self._working("export"):
            self._learner.export_adapter(folder)

    def take_timing(self, until_s: float | None = None) -> StepTiming:
        """What the learner did since the previous timing; as `PhaseClock.take_timing`."""
        return self._clock.take_timing(until_s)

    def reports(self, group_ids: Sequence[str] | None = None) -> list[GroupReport]:
        """The accepted groups that wait, in order of arrival: those asked for, or all."""
        return self._learner.buffer.reports(group_ids)

    def digest(self, policy_version: int, timeout_s: float) -> str:
        """As `RecordedLearner.digest`."""
        return self._learner.digest(policy_version, timeout_s)

    def health(self) -> LearnerHealth:
        """How the learner is; a background failure shows here first. The driver asks all the time:
        where it does not, the process ends (`services/process/driver_lease.py`).
        """
        if self._lease is not None:
            self._lease.renew()
        buffer = self._learner.buffer
        return LearnerHealth(
            problem=self._learner.problem,
            doing=self._doing,
            policy_version=self._learner.policy_version,
            issued_version=buffer.current_version,
            counts=buffer.counts(),
            memory=process_memory(device_memory(self._devices)),
            activity=self._activity(),
            saving=self._learner.saving,
        )

    def _activity(self) -> Activity:
        doing = self._clock.current
        if doing == "idle" and self._learner.publishing:
            doing = "publish"
        return Activity(doing=doing, counters=self._learner.progress)

    def evidence(self) -> dict[str, str]:
        """Stacks and last log lines of this process, by file name."""
        return stacks.own_evidence()

    def close(self) -> list[Saved]:
        """Stops the server, where calls in progress get a moment to end; then as
        `RecordedLearner.close`.
        """
        try:
            self._server.stop(grace_s=2.0)
        finally:
            ended = self._learner.close()
        return ended

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
