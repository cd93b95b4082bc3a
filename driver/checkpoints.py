"""When checkpoints of a run are written, and what became of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driver.accounting.run_state import RunState
from driver.config.sections.checkpoint import CheckpointConfig
from driver.errors import RunError
from driver.reports.step_report import StepReports
from driver.supervisor import Supervisor
from learner.durable.saved import Saved, checkpoint_metrics


class Checkpoints:
    """Has the learner write checkpoints of the last closed step, and notes which are complete."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        supervisor: Supervisor,
        reports: StepReports,
        warn: Callable[[str], None],
        wait_s: float,
    ):
        """Args:
        wait_s: for a checkpoint, and as long again for the one before it.
        """
        self._config = config
        self._supervisor = supervisor
        self._reports = reports
        self._warn = warn
        self._wait_s = wait_s
        self._begun_step: int | None = None
        """Of the newest in the background, whose report may be on its way."""
        self._saved_step: int | None = None
        """Of the newest that is known to be complete, of the learner that is there."""
        self._ended: list[Saved] = []
        """Those that ended since a step was last closed."""

    def forget(self) -> None:
        """Another learner knows nothing of what the one before had begun."""
        self._begun_step = self._saved_step = None

    def save_in_passing(self, state: RunState) -> None:
        """Writes a checkpoint where one is due; if that fails, the run warns and goes on."""
        every = self._config.every_steps
        if not every or state.step % every:
            return
        if not self._config.asynchronous:
            self.record(self._save(state), state)
            return
        self._begun_step = state.step
        begun = self._supervisor.learner.begin_save(*self._what_to_save(state))
        self._supervisor.wait_for(begun, timeout_s=2 * self._wait_s)

    def save_last(self, state: RunState) -> None:
        """Leaves a checkpoint of the last closed step, which may be there or on its way.

        Raises:
            RunError: if it cannot be written.
        """
        if self._begun_step == state.step:
            self.record(self._end_saving(), state)
        if self._saved_step == state.step:
            return
        *earlier, last = self._save(state)
        self.record(earlier, state)
        if last.problem:
            raise RunError(f"step {last.step}: {last.problem}; --resume goes on from the record")
        self.record([last], state)

    def record(self, ended: Sequence[Saved], state: RunState) -> None:
        """Notes what became of checkpoints, oldest first."""
        self._ended += ended
        for saved in ended:
            if saved.problem:
                self._warn(
                    f"step {saved.step}: {saved.problem}; the run goes on from the one before"
                )
            else:
                self._saved_step = saved.step
                self._reports.record_checkpoint(state.step, saved.step)
            for left in saved.not_removed:
                self._warn(f"step {saved.step}: {left}")

    def take_metrics(self) -> dict[str, float]:
        """What those cost that ended since the last call."""
        metrics = checkpoint_metrics(self._ended)
        self._ended.clear()
        return metrics

    def _end_saving(self) -> list[Saved]:
        """Waits for the checkpoint in the background, as `_save` does for its own."""
        ended = self._supervisor.learner.end_saving()
        return self._supervisor.wait_for(ended, timeout_s=2 * self._wait_s, interruptible=False)

    def _save(self, state: RunState) -> list[Saved]:
        """Writes a checkpoint, after one that is still being written.

        Returns:
            Those that ended since the last report; the last is this one. A signal does not end the
            wait, which would lose them.
        """
        saving = self._supervisor.learner.save(*self._what_to_save(state))
        return self._supervisor.wait_for(saving, timeout_s=2 * self._wait_s, interruptible=False)

    def _what_to_save(
        self, state: RunState
    ) -> tuple[int, dict[str, Any], Mapping[int, float | None]]:
        """The last closed step, the run state, and the scores of evaluated steps."""
        kept = state.checkpoint_state(self._reports.ledger_state())
        scores = state.evaluations.scores() if self._config.keep_best else {}
        return state.step, kept, scores
