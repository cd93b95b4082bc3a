"""Starts the actors of a run as `placement.mode` says, and gives out the handles to call them.

Each actor has a process of its own, or the learner's process has the worker too (`colocated.py`).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from driver.config.sections.placement import PlacementConfig, Resources
from driver.config.shell_switches import FIXED
from driver.fleet.actor_calls import ActorLost, Call
from driver.fleet.cluster import bundle
from driver.fleet.colocated import ColocatedActor
from driver.fleet.handles import LearnerHandle, WorkerHandle
from driver.fleet.rooms import Room
from learner.actor import LearnerActor
from learner.durable.saved import Saved
from learner.learner_records import LearnerHealth, LearnerInfo, Restored, UpdateReport
from learner.learner_spec import LearnerSpec
from rollout_worker.actor import RolloutActor
from rollout_worker.worker_records import (
    EvalItem,
    EvalRequest,
    News,
    Orders,
    RolloutSpec,
    WorkerInfo,
)
from services.process.span_log import StepTiming
from services.trajectories.group_report import GroupReport

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

CALLS_AT_ONCE = 16
"""Threads of an actor: questions are answered while it works."""
CHILDREN_END_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""For Ray, which would kill the guardian of the scorers with an actor, so that all that they have
started in sessions of their own goes on."""


class Launcher:
    """Knows in which process a rollout worker is to be started."""

    def __init__(self, placement: PlacementConfig):
        self._placement = placement
        self._learner_process: ActorHandle | None = None
        """The newest one, where the worker has none of its own."""

    @property
    def colocated(self) -> bool:
        """Whether the worker lives in the learner's process, and ends with it."""
        return self._placement.mode == "colocated"

    def start_learner(self, spec: LearnerSpec, room: Room) -> LearnerHandle:
        """Starts a process for the learner, and for the worker where they share one.

        Raises:
            ActorLost: if Ray takes no actor.
        """
        kind = ColocatedActor if self.colocated else LearnerActor
        self._learner_process = self._start(kind, spec, self._placement.learner, room)
        return _Learner(self._learner_process, "the learner")

    def start_worker(self, spec: RolloutSpec, room: Room) -> tuple[WorkerHandle, Call[WorkerInfo]]:
        """Starts a worker.

        Args:
            room: for a process of its own.

        Returns:
            its handle, and a call that ends when it is ready.

        Raises:
            ActorLost: if Ray takes no actor.
        """
        if self.colocated:
            process = self._learner_process
            assert process is not None
            ready = Call.start(lambda: process.start_worker.remote(spec), spec.name, "start")
            return _ColocatedWorker(process, spec.name), ready
        actor = self._start(RolloutActor, spec, self._placement.rollout, room)
        return _Worker(actor, spec.name), Call.start(actor.describe.remote, spec.name, "start")

    def _start(
        self, kind: type, spec: LearnerSpec | RolloutSpec, resources: Resources, room: Room
    ) -> ActorHandle:
        """Creates an actor in its room, on the platform that the run asks for."""
        asked = bundle(resources)
        environment = platform_environment(self._placement.platform, resources)
        environment |= CHILDREN_END_THEMSELVES
        actor_class = ray.remote(kind).options(
            num_cpus=asked.pop("CPU", 0),
            num_gpus=asked.pop("GPU", 0),
            resources=asked,
            max_concurrency=CALLS_AT_ONCE,
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=room.group, placement_group_bundle_index=room.bundle
            ),
        )
        try:
            return cast(ActorHandle, actor_class.remote(spec))
        except RayError as error:
            raise ActorLost.by(error) from error


def platform_environment(platform: str, resources: Resources) -> dict[str, str]:
    """What JAX in an actor must know before it is imported, so that it takes its share and no more,
    and computes as in any other shell.

    Two processes on one TPU host each name the shape of their chips to libtpu; Ray has chosen
    which. Two on one GPU each get their share of the memory, less a tenth for CUDA itself.
    """
    env = FIXED | {"JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform)}
    if 0 < resources.gpus < 1:
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * resources.gpus:.3f}"
    shape = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}.get(round(resources.tpus))
    if platform == "tpu" and shape:
        env |= {
            "TPU_CHIPS_PER_PROCESS_BOUNDS": shape,
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    return env


class _Actor(Generic[A]):
    """A Ray actor of a known class, whose methods are called as the class declares them."""

    def __init__(self, process: ActorHandle, name: str):
        self._process = process
        self._name = name

    def kill(self) -> None:
        with contextlib.suppress(RayError):  # where it cannot be found, it is gone
            ray.kill(self._process)

    def _call(
        self, method: Callable[Concatenate[A, P], T], *arguments: P.args, **named: P.kwargs
    ) -> Call[T]:
        remote = getattr(self._process, method.__name__)  # Ray's handles have no types
        return Call.start(lambda: remote.remote(*arguments, **named), self._name, method.__name__)


class _Learner(_Actor[LearnerActor]):
    def describe(self) -> Call[LearnerInfo]:
        return self._call(LearnerActor.describe)

    def restore(self) -> Call[Restored | None]:
        return self._call(LearnerActor.restore)

    def publish(self) -> Call[int]:
        return self._call(LearnerActor.publish)

    def update(
        self, group_ids: Sequence[str], dropped_ids: Sequence[str], timeout_s: float
    ) -> Call[UpdateReport]:
        return self._call(LearnerActor.update, group_ids, dropped_ids, timeout_s)

    def save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> Call[list[Saved]]:
        return self._call(LearnerActor.save, step, driver_state, scores)

    def begin_save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> Call[None]:
        return self._call(LearnerActor.begin_save, step, driver_state, scores)

    def end_saving(self) -> Call[list[Saved]]:
        return self._call(LearnerActor.end_saving)

    def export(self, folder: str) -> Call[str]:
        return self._call(LearnerActor.export, folder)

    def export_adapter(self, folder: str) -> Call[None]:
        return self._call(LearnerActor.export_adapter, folder)

    def reports(self, group_ids: Sequence[str]) -> Call[list[GroupReport]]:
        return self._call(LearnerActor.reports, group_ids)

    def health(self) -> Call[LearnerHealth]:
        return self._call(LearnerActor.health)

    def take_timing(self, until_s: float) -> Call[StepTiming]:
        return self._call(LearnerActor.take_timing, until_s)

    def evidence(self) -> Call[dict[str, str]]:
        return self._call(LearnerActor.evidence)

    def close(self) -> Call[list[Saved]]:
        return self._call(LearnerActor.close)


class _Worker(_Actor[RolloutActor]):
    def order(self, orders: Orders) -> None:
        self._call(RolloutActor.order, orders)

    def news(self, wait_s: float) -> Call[News]:
        return self._call(RolloutActor.news, wait_s)

    def evaluate(self, request: EvalRequest) -> Call[list[EvalItem]]:
        return self._call(RolloutActor.evaluate, request)

    def take_timing(self, until_s: float) -> Call[StepTiming]:
        return self._call(RolloutActor.take_timing, until_s)

    def evidence(self) -> Call[dict[str, str]]:
        return self._call(RolloutActor.evidence)

    def close(self) -> Call[None]:
        return self._call(RolloutActor.close)


class _ColocatedWorker(_Worker):
    def kill(self) -> None:
        """Ends nothing: the process is the learner's."""

    def _call(
        self,
        method: Callable[Concatenate[RolloutActor, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Call[T]:
        call = self._process.call_worker
        return Call.start(
            lambda: call.remote(method, *arguments, **named), self._name, method.__name__
        )
