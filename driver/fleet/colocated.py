"""Learner and one rollout worker in one process, on one set of devices.

Each is the same class as in a process of its own, with its own threads, clock and connections: only
weights do not travel (learner/publish/shared_snapshot.py). The process is the learner's: the worker
is started in it, and whatever ends one of them ends both.
"""

import enum
from typing import Any

import ray

from learner.actor import LearnerActor
from learner.learner_spec import LearnerSpec
from learner.publish.shared_snapshot import HandOver
from rollout_worker.actor import RolloutActor, RolloutSpec


class Role(enum.Enum):
    """Who in the process is called."""

    LEARNER = "learner"
    WORKER = "worker"


class ColocatedActor:
    """Owns the learner of a run and, once it is started, the run's only rollout worker."""

    def __init__(self, spec: LearnerSpec):
        self._hand_over = HandOver()
        self._actors: dict[Role, LearnerActor | RolloutActor] = {
            Role.LEARNER: LearnerActor(spec, self._hand_over.put)
        }

    def start_worker(self, spec: RolloutSpec) -> dict[str, Any]:
        """Starts the worker, and returns what it says of itself."""
        assert Role.WORKER not in self._actors
        worker = self._actors[Role.WORKER] = RolloutActor(spec, self._hand_over.wait)
        return worker.describe()

    def call(self, role: Role, method: str, *arguments: Any) -> Any:
        """Calls a public method of one of them.

        Raises:
            RuntimeError: if the worker is not there yet.
        """
        if role not in self._actors:
            raise RuntimeError(f"the {role.value} of this process has not started yet")
        return getattr(self._actors[role], method)(*arguments)


class Part:
    """Stands for one role of a ColocatedActor as an actor's handle does: `part.method.remote()`."""

    def __init__(self, process: Any, role: Role):
        """Args:
        process: handle of the ColocatedActor.
        """
        self._process = process
        self._role = role

    def __getattr__(self, method: str) -> "PartMethod":
        return PartMethod(self._process, self._role, method)

    def kill(self) -> None:
        """Ends the process if this is its learner; that of a worker is not its own."""
        if self._role is Role.LEARNER:
            ray.kill(self._process)


class PartMethod:
    """A method of a Part."""

    def __init__(self, process: Any, role: Role, method: str):
        self._process = process
        self._role = role
        self._method = method

    def remote(self, *arguments: Any) -> Any:
        """Calls it; returns Ray's reference to the result."""
        return self._process.call.remote(self._role, self._method, *arguments)
