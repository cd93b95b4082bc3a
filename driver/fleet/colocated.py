"""Learner and one rollout worker in one process, on one set of devices.

Each is the same class as in a process of its own, with its own threads, clock and connections: only
weights do not travel (learner/publish/shared_snapshot.py). The process is the learner's: the worker
is started in it, and whatever ends one of them ends both.
"""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from learner.actor import LearnerActor
from learner.learner_spec import LearnerSpec
from learner.publish.shared_snapshot import SharedSnapshot
from rollout_worker.actor import RolloutActor
from rollout_worker.worker_records import RolloutSpec, WorkerInfo

P = ParamSpec("P")
T = TypeVar("T")


class ColocatedActor(LearnerActor):
    """The learner of a run, which also owns the only rollout worker once that is started."""

    def __init__(self, spec: LearnerSpec):
        """Starts the learner alone."""
        self._shared = SharedSnapshot()
        self._worker: RolloutActor | None = None
        super().__init__(spec, self._shared.offer_version)

    def start_worker(self, spec: RolloutSpec) -> WorkerInfo:
        """Starts the worker; once for each process."""
        assert self._worker is None
        self._worker = RolloutActor(spec, self._shared.wait_for_version)
        return self._worker.describe()

    def call_worker(
        self,
        method: Callable[Concatenate[RolloutActor, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        """Calls a method of the worker.

        Raises:
            RuntimeError: if the worker is not there yet.
        """
        if self._worker is None:
            raise RuntimeError("the worker of this process has not started yet")
        return method(self._worker, *arguments, **named)
