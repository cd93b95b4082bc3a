"""What the driver asks of the learner and of a rollout worker, in whichever process each runs.

Every method starts a call and returns at once (`actor_calls.py`); none fails because the process
is gone, which shows in the result. The arguments and results are those of the methods of
`LearnerActor` and `RolloutActor` that have the same name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from driver.fleet.actor_calls import Call
from learner.durable.saved import Saved
from learner.learner_records import LearnerHealth, LearnerInfo, Restored, UpdateReport
from rollout_worker.worker_records import EvalItem, EvalRequest, News, Orders
from services.process.span_log import StepTiming
from services.trajectories.group_report import GroupReport


class LearnerHandle(Protocol):
    """The learner of a run."""

    def describe(self) -> Call[LearnerInfo]:
        """The first call: ends when the learner serves."""
        ...

    def restore(self) -> Call[Restored | None]:
        """Goes back to the newest checkpoint, and reports where the run stands."""
        ...

    def publish(self) -> Call[int]:
        """Offers the current policy to the workers; its version."""
        ...

    def update(
        self, group_ids: Sequence[str], dropped_ids: Sequence[str], timeout_s: float
    ) -> Call[UpdateReport]:
        """Trains on groups, and starts to publish the version that comes of it."""
        ...

    def save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> Call[list[Saved]]:
        """Writes a checkpoint. The driver's state comes back from `restore` unread.

        Returns:
            Those that ended since the last report; the last is this one.

        Args:
            scores: of evaluated steps, higher is better: the best checkpoint of them stays.
        """
        ...

    def begin_save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> Call[None]:
        """Has a checkpoint written in the background; a later report says what became of it."""
        ...

    def end_saving(self) -> Call[list[Saved]]:
        """Waits for the checkpoint in the background; those that ended since the last report."""
        ...

    def export(self, folder: str) -> Call[str]:
        """Writes the policy as a Hugging Face folder; the types of its tensors."""
        ...

    def export_adapter(self, folder: str) -> Call[None]:
        """Writes the adapter that trains as a folder of PEFT."""
        ...

    def reports(self, group_ids: Sequence[str]) -> Call[list[GroupReport]]:
        """The groups that wait in the buffer, of those asked for."""
        ...

    def health(self) -> Call[LearnerHealth]:
        """How the learner is; answered while it works."""
        ...

    def take_timing(self, until_s: float) -> Call[StepTiming]:
        """Its step timing, up to a moment of its own clock."""
        ...

    def evidence(self) -> Call[dict[str, str]]:
        """Stacks and last log lines of its process, by file name; answered while it works."""
        ...

    def close(self) -> Call[list[Saved]]:
        """Ends its server and threads; the checkpoints that ended since the last report."""
        ...

    def kill(self) -> None:
        """Ends the process at once."""
        ...


class WorkerHandle(Protocol):
    """A rollout worker."""

    def order(self, orders: Orders) -> None:
        """Sends orders, and waits for nothing: a process that is gone shows at its next news."""
        ...

    def news(self, wait_s: float) -> Call[News]:
        """What happened since the last call; ends when something happens or after `wait_s`."""
        ...

    def evaluate(self, request: EvalRequest) -> Call[list[EvalItem]]:
        """Completes and scores held-out prompts."""
        ...

    def take_timing(self, until_s: float) -> Call[StepTiming]:
        """Its step timing, up to a moment of its own clock."""
        ...

    def evidence(self) -> Call[dict[str, str]]:
        """Stacks and last log lines of its process, by file name; answered while it works."""
        ...

    def close(self) -> Call[None]:
        """Ends its threads and connections."""
        ...

    def kill(self) -> None:
        """Ends the process at once, if it is the worker's own."""
        ...
