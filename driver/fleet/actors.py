"""Ray actors of a run: how one is started on its platform, and what its errors say."""

import re
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from driver.config.run_config import PlacementConfig, Resources
from driver.errors import RunError
from driver.fleet.cluster import ResourcesNotMet, bundle
from driver.fleet.colocated import Part

GONE = (RayActorError, WorkerCrashedError)
"""What Ray raises where the process of an actor is no more."""
POLL_S = 0.5
"""How often a wait looks for a signal."""
CALLS_AT_ONCE = 16
"""Threads of an actor: questions are answered while it works."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*: ")
"""A line such as `package.SomeError: what happened`, not indented."""


class ActorFailed(RunError):
    """An actor could not start, or raised an error of its own."""


class LearnerLost(RunError):
    """The learner process died, or must be replaced."""


class NoAnswer(RunError):
    """An actor did not answer within its deadline."""


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


def died(error: BaseException) -> bool:
    """Whether a process ended by itself, and not by an error of its constructor."""
    return isinstance(error, RayActorError) and "creation task" not in str(error)


def message_of(error: BaseException) -> str:
    """What went wrong in an actor: the end of the traceback that Ray sends as text."""
    if died(error):
        return "its process ended unexpectedly: killed, out of memory, or crashed"
    lines = str(error).strip().splitlines()
    starts = [i for i, line in enumerate(lines) if _RAISED.match(line)]
    return "\n".join(lines[starts[-1] :] if starts else lines[-1:])


def start(cls: type, spec: Any, placement: PlacementConfig, role: str, room: "Room") -> Any:
    """Creates an actor in its room, on the platform that the run asks for; returns its handle.

    Args:
        role: `learner` or `rollout`, whose resources it takes.
    """
    resources = placement.learner if role == "learner" else placement.rollout
    asked = bundle(resources)
    return (
        ray.remote(cls)
        .options(
            num_cpus=asked.pop("CPU", 0),
            num_gpus=asked.pop("GPU", 0),
            resources=asked,
            max_concurrency=CALLS_AT_ONCE,
            runtime_env={"env_vars": platform_environment(placement.platform, resources)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=room.group, placement_group_bundle_index=room.bundle
            ),
        )
        .remote(spec)
    )


def kill(handle: Any) -> None:
    """Ends the process of an actor at once; a worker in the learner's process has none to end."""
    if isinstance(handle, Part):
        handle.kill()
    else:
        ray.kill(handle)


class Room:
    """A reserved place for one actor."""

    def __init__(self, group: PlacementGroup, bundle: int, *, shared: bool):
        """Args:
        shared: whether others have bundles in the same group, so that it must stay.
        """
        self.group = group
        self.bundle = bundle
        self.shared = shared


def result_of(call: Any, who: str, what: str) -> Any:
    """The result of a call that has ended.

    Raises:
        ActorFailed: if it raised an error of its own.
        RayActorError, WorkerCrashedError: if its process is gone.
    """
    try:
        return ray.get(call)
    except GONE:
        raise
    except RayTaskError as error:
        raise ActorFailed(
            f"{who} failed in {what!r}: {message_of(error)}", details=str(error)
        ) from error


def start_failure(error: BaseException, who: str) -> RunError:
    """What a person should read where an actor's constructor did not end well."""
    if isinstance(error, RunError):
        return error
    message = message_of(error)
    kind = ResourcesNotMet if "WrongPlatform: " in message else ActorFailed
    return kind(f"{who} could not start: {message}", details=str(error))
