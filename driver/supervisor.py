"""Starts the actors, hands them work, and replaces rollout workers that are lost.

Every wait ends: by its result, by a signal, or by a deadline whose error names who was waited for.
"""

import dataclasses
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from driver.cluster import ResourcesNotMet, bundle
from driver.config import Resources, RunConfig
from driver.errors import RunError
from driver.signals import StopSignal
from learner.actor import LearnerActor, LearnerSpec
from rollout_worker.actor import RolloutActor, RolloutReport, RolloutSpec
from services.messages import Lease

_RAISED = re.compile(r"[A-Za-z_][\w.]*: ")
"""A line such as `package.SomeError: what happened`, not indented."""
POLL_S = 0.5
"""How often a wait looks for a signal."""


class LearnerLost(RunError):
    """The learner process died; the run can only resume from its last checkpoint."""


class WorkersLost(RunError):
    """Rollout workers failed more often than the run allows."""


class ActorFailed(RunError):
    """An actor could not start, or raised an error of its own."""


class NoAnswer(RunError):
    """An actor did not answer within its deadline."""


def shares(work: Sequence[Any], workers: int) -> list[list[Any]]:
    """Cuts work into one share for each worker, in order; the last may be smaller or none.

    A share is a worker's whole part: the slots of its engine refill themselves.
    """
    size = max(1, math.ceil(len(work) / workers))
    return [list(work[start : start + size]) for start in range(0, len(work), size)]


def platform_environment(platform: str, resources: Resources) -> dict[str, str]:
    """What JAX in an actor must know before it is imported, so that it takes its part and no more.

    Two processes on one TPU host each name the shape of their chips to libtpu; Ray has chosen
    which. Two on one GPU each get their share of the memory, less a tenth for CUDA itself.
    """
    env = {"JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform)}
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


def message_of(error: BaseException) -> str:
    """What went wrong in an actor: the end of the traceback that Ray sends as text."""
    if isinstance(error, RayActorError) and "creation task" not in str(error):
        return "its process ended unexpectedly: killed, out of memory, or crashed"
    lines = str(error).strip().splitlines()
    starts = [i for i, line in enumerate(lines) if _RAISED.match(line)]
    return "\n".join(lines[starts[-1] :] if starts else lines[-1:])


class Supervisor:
    """Owns the actors of one run."""

    def __init__(
        self,
        config: RunConfig,
        group: PlacementGroup,
        stop: StopSignal,
        warn: Callable[[str], None],
    ):
        self._config = config
        self._warn = warn
        self._group = group
        self._stop = stop
        self._learner = None
        self._workers: dict[str, Any] = {}
        self._make_rollout_spec: Callable[[str], RolloutSpec]
        self._replaced: set[str] = set()
        self.restarts = 0

    def start_learner(self, spec: LearnerSpec) -> dict[str, Any]:
        """Starts the learner and waits until it serves; returns what it says of itself."""
        self._learner = self._actor(LearnerActor, spec, 0)
        timeout_s = self._config.placement.startup_timeout_s
        return self._started(self._learner.describe.remote(), "learner", timeout_s)

    def start_workers(self, make_spec: Callable[[str], RolloutSpec]) -> list[dict[str, Any]]:
        """Starts all rollout workers and waits until each is ready."""
        self._make_rollout_spec = make_spec
        for index in range(self._config.rollout.workers.at_start):
            name = f"rollout-{index}"
            self._workers[name] = self._actor(RolloutActor, make_spec(name), index + 1)
        calls = {name: worker.describe.remote() for name, worker in self._workers.items()}
        timeout_s = self._config.placement.startup_timeout_s
        return [self._started(call, name, timeout_s) for name, call in calls.items()]

    def learner(self, method: str, *arguments, timeout_s: float, interruptible: bool = True) -> Any:
        """Calls the learner and waits.

        Args:
            interruptible: whether a signal ends the wait; an update is waited for, so that the
                books know what it trained on.

        Raises:
            LearnerLost: if its process is gone.
            ActorFailed: if it raised an error of its own.
            NoAnswer: naming the method.
        """
        call = getattr(self._learner, method).remote(*arguments)
        try:
            return self._get(call, "learner", method, timeout_s, interruptible)
        except ActorFailed:
            raise
        except (RayActorError, WorkerCrashedError) as error:
            raise LearnerLost(
                f"the learner died during {method!r}; --resume goes on from the last checkpoint: "
                f"{message_of(error)}",
                details=str(error),
            ) from error

    def rollout(self, leases: Sequence[Lease], policy_version: int) -> list[RolloutReport]:
        """Has every lease turned into a group in the learner's buffer, whoever dies meanwhile."""
        again = lambda piece: [dataclasses.replace(x, attempt=x.attempt + 1) for x in piece]
        pieces = shares(leases, len(self._workers))
        return self._spread("rollout", pieces, (policy_version,), retry=again)

    def evaluate(self, positions: Sequence[int], policy_version: int) -> list[dict[str, Any]]:
        """Completes and scores held-out prompts on all workers."""
        settings = self._config.eval
        arguments = (policy_version, settings.samples_per_prompt, settings.sampling)
        pieces = shares(positions, len(self._workers))
        found = self._spread("evaluate", pieces, arguments, retry=list)
        return [item for items in found for item in items]

    def laps(self) -> dict[str, dict[str, float]]:
        """Seconds by phase of every process since the last call.

        A worker that has died meanwhile has none; it is replaced when it is needed next.
        """
        timeout_s = self._config.placement.step_timeout_s
        laps = {"learner": self.learner("lap", timeout_s=timeout_s)}
        calls = {name: worker.lap.remote() for name, worker in self._workers.items()}
        for name, call in calls.items():
            try:
                laps[name] = self._get(call, name, "lap", timeout_s)
            except (RayActorError, WorkerCrashedError):
                self._replaced.add(name)
                laps[name] = {"idle": 0.0}
        return laps

    def take_replaced(self) -> set[str]:
        """Workers whose process ended since the last call, so that their laps have a gap."""
        replaced, self._replaced = self._replaced, set()
        return replaced

    def shutdown(self, grace_s: float = 10.0) -> None:
        """Ends every actor; what does not end by itself in time is killed."""
        actors = [*self._workers.values(), self._learner]
        closing = [actor.close.remote() for actor in actors if actor is not None]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=grace_s)
        for actor in actors:
            if actor is not None:
                ray.kill(actor)
        self._workers, self._learner = {}, None

    def _spread(self, method: str, pieces: list, arguments: tuple, retry: Callable) -> list:
        """Gives pieces of work to whichever worker is free until all are done."""
        waiting, running, results = deque(pieces), {}, []
        timeout_s = self._config.placement.step_timeout_s
        while waiting or running:
            busy = {name for name, _, _ in running.values()}
            for name in [name for name in self._workers if name not in busy]:
                if waiting:
                    piece = waiting.popleft()
                    call = getattr(self._workers[name], method).remote(piece, *arguments)
                    running[call] = (name, piece, time.monotonic() + timeout_s)
            done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
            self._stop.check()
            late = [c for c, (_, _, deadline) in running.items() if time.monotonic() > deadline]
            for call in {*done, *late}:
                name, piece, _ = running.pop(call)
                try:
                    if call not in done:
                        raise NoAnswer(f"{name} did not finish {method} in {timeout_s:g} s")
                    results.append(ray.get(call))
                except (RayActorError, WorkerCrashedError, RayTaskError, NoAnswer) as error:
                    waiting.appendleft(retry(piece))
                    self._replace(name, error)
        return results

    def _replace(self, name: str, error: BaseException) -> None:
        """Starts a lost or failed worker anew; it fetches the current weights before it works.

        A start that fails is a restart too.
        """
        while True:
            self._count_restart(name, error)
            ray.kill(self._workers[name])
            index = int(name.rsplit("-", 1)[1])
            self._workers[name] = self._actor(
                RolloutActor, self._make_rollout_spec(name), index + 1
            )
            try:
                actor = self._started(
                    self._workers[name].describe.remote(),
                    name,
                    self._config.placement.startup_timeout_s,
                )
                self._replaced.add(name)
                self._warn(f"{name} is back: process {actor['pid']} on {actor['host']}")
                return
            except (ActorFailed, NoAnswer) as failure:
                error = failure

    def _count_restart(self, name: str, error: BaseException) -> None:
        self.restarts += 1
        allowed = self._config.placement.worker_restarts
        if self.restarts > allowed:
            raise WorkersLost(
                f"{name} failed and placement.worker_restarts={allowed} is used up: "
                f"{message_of(error)}",
                details=str(error),
            ) from error
        self._warn(f"{name} failed, restart {self.restarts} of {allowed}: {message_of(error)}")

    def _get(self, call, who: str, what: str, timeout_s: float, interruptible: bool = True) -> Any:
        """The result of one call, looking for signals while it waits."""
        deadline = time.monotonic() + timeout_s
        while not ray.wait([call], timeout=POLL_S)[0]:
            if interruptible:
                self._stop.check()
            if time.monotonic() > deadline:
                raise NoAnswer(f"{who} did not answer {what!r} within {timeout_s:g} s")
        try:
            return ray.get(call)
        except RayTaskError as error:
            raise ActorFailed(
                f"{who} failed in {what!r}: {message_of(error)}", details=str(error)
            ) from error

    def _started(self, call, who: str, timeout_s: float) -> dict[str, Any]:
        """What a new actor says of itself.

        Raises:
            ActorFailed: with what its constructor raised.
        """
        try:
            return self._get(call, who, "start", timeout_s)
        except (RayActorError, WorkerCrashedError) as error:
            message = message_of(error)
            kind = ResourcesNotMet if "WrongPlatform: " in message else ActorFailed
            raise kind(f"{who} could not start: {message}", details=str(error)) from error

    def _actor(self, cls: type, spec: Any, index: int):
        """Creates an actor in its own bundle, on the platform that the run asks for."""
        placement = self._config.placement
        resources = placement.learner if index == 0 else placement.rollout
        asked = bundle(resources)
        return (
            ray.remote(cls)
            .options(
                num_cpus=asked.pop("CPU", 0),
                num_gpus=asked.pop("GPU", 0),
                resources=asked,
                runtime_env={"env_vars": platform_environment(placement.platform, resources)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            )
            .remote(spec)
        )
