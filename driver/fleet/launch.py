"""Starts the actors of a run as `placement.mode` says: each in a process of its own, or both roles
in one.
"""

from typing import Any

from driver.config.run_config import PlacementConfig
from driver.fleet import actors
from driver.fleet.actors import Room
from driver.fleet.colocated import ColocatedActor, Part, Role
from learner.actor import LearnerActor
from learner.learner_spec import LearnerSpec
from rollout_worker.actor import RolloutActor, RolloutSpec


class Launcher:
    """Knows in which process a rollout worker is to be started."""

    def __init__(self, placement: PlacementConfig):
        self._placement = placement
        self._shared: Any = None
        """The newest process of the learner, where the worker has none of its own."""

    @property
    def colocated(self) -> bool:
        """Whether the worker lives in the learner's process, and ends with it."""
        return self._placement.mode == "colocated"

    def learner(self, spec: LearnerSpec, room: Room) -> Any:
        """Starts a process; returns the learner's handle."""
        if not self.colocated:
            return actors.start(LearnerActor, spec, self._placement, "learner", room)
        self._shared = actors.start(ColocatedActor, spec, self._placement, "learner", room)
        return Part(self._shared, Role.LEARNER)

    def worker(self, spec: RolloutSpec, room: Room) -> tuple[Any, Any]:
        """Starts a worker.

        Args:
            room: for a process of its own.

        Returns:
            its handle, and the call that tells what it says of itself once it is ready.
        """
        if self.colocated:
            call = self._shared.start_worker.remote(spec)
            return Part(self._shared, Role.WORKER), call
        actor = actors.start(RolloutActor, spec, self._placement, "rollout", room)
        return actor, actor.describe.remote()
