"""Scores the held-out sets of a run under one policy version."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from driver.accounting.run_state import RunState
from driver.config.sections.evaluation import EvalConfig, HeldOutSet
from driver.evaluation.eval_results import Evaluated, record_evaluation
from driver.evaluation.idle_evaluation import IdleEvaluation
from driver.fleet.actor_calls import ActorFailed, ActorLost, Call, NoAnswer
from driver.fleet.fleet_worker import Worker
from driver.fleet.handles import WorkerHandle
from driver.reports.evaluation import is_due
from driver.reports.step_report import StepReports
from driver.supervisor import Supervisor
from rollout_worker.worker_records import EvalItem, EvalRequest, Orders
from services.wire.messages import NO_VERSION


def shares(work: Sequence[int], workers: int) -> list[list[int]]:
    """Cuts work into one share for each worker, in order; the last may be smaller or none."""
    return shares_of_size(work, max(1, math.ceil(len(work) / workers)))


def shares_of_size(work: Sequence[int], size: int) -> list[list[int]]:
    """Cuts work into shares of a size, in order; the last may be smaller."""
    return [list(work[start : start + size]) for start in range(0, len(work), size)]


class Evaluator:
    """Knows when an evaluation is due, and how it is done: at once, while training waits, or beside
    it by workers that have nothing else to do.

    The result of an evaluation beside training is in the metrics of the step in which it is
    complete. It is waited for before the next one is due, and at the end of the run, so that no
    step has two.
    """

    def __init__(
        self,
        config: EvalConfig,
        sets: Sequence[HeldOutSet],
        prompts: Sequence[int],
        supervisor: Supervisor,
        reports: StepReports,
        *,
        steps: int,
        timeout_s: float,
        slots: int = 1,
        beside_training: bool = False,
    ):
        """Args:
        prompts: that the data has for each set.
        steps: of the run.
        timeout_s: bound of one worker's share while training waits.
        slots: completions that a worker decodes at once.
        beside_training: whether evaluations between the first and the last step are.
        """
        self._config = config
        self._sets = sets
        self._prompts = [one.used_prompts(found) for one, found in zip(sets, prompts, strict=True)]
        self._supervisor = supervisor
        self._reports = reports
        self._steps = steps
        self._timeout_s = timeout_s
        self._slots = slots
        self._beside_training = beside_training
        self._idle: IdleEvaluation | None = None
        """That is under way beside training."""

    def is_due(self, step: int) -> bool:
        """Whether the prompts are completed after a step; step 0 is before the first."""
        return is_due(step, self._steps, self._config)

    def _is_beside_training(self, step: int) -> bool:
        """Whether the evaluation of a step goes on while later steps are trained."""
        return self._beside_training and 0 < step < self._steps and not self.is_due(step + 1)

    def _must_wait(self, step: int) -> bool:
        """Whether one that is under way must be complete before a step is closed."""
        return self._idle is not None and (step == self._steps or self.is_due(step + 1))

    def catch_up(self, state: RunState) -> dict[str, float]:
        """Evaluates the step that a run begins or goes on with, where that is due and not done.

        Returns:
            metrics, unless it is done beside training.
        """
        pending, state.evaluations.pending = state.evaluations.pending, None
        if self.is_due(state.step) and not state.evaluations.has_step(state.step):
            return self._evaluate_due(state)
        if pending is not None:
            self._reports.say(
                f"step {pending}: its evaluation, which was under way when the run stopped, is "
                "left out: its policy version is gone"
            )
        return {}

    def end_step(
        self,
        state: RunState,
        without_leases: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> dict[str, float]:
        """What is due after a step was trained, and before it is closed.

        Args:
            without_leases: no worker gets a lease meanwhile.

        Returns:
            metrics of the evaluation that is complete by then, if one is.
        """
        metrics: dict[str, float] = {}
        if self._must_wait(state.step):
            with without_leases():
                metrics = self._wait(state)
        else:
            metrics = self._take_result(state)
        return metrics | (self._evaluate_due(state) if self.is_due(state.step) else {})

    def _evaluate_due(self, state: RunState) -> dict[str, float]:
        if not self._is_beside_training(state.step):
            return self.evaluate(state)
        self._begin(state)
        return {}

    @property
    def keeps(self) -> int:
        """The policy version that workers keep for it; NO_VERSION for none."""
        return NO_VERSION if self._idle is None else self._idle.policy_version

    @property
    def calls(self) -> Collection[Call[list[EvalItem]]]:
        """Shares that workers have, beside training."""
        return () if self._idle is None else self._idle.calls

    def _begin(self, state: RunState) -> None:
        """Begins the evaluation of the step that was trained last, beside training."""
        requests = [
            self._request(which, share, state.policy_version, when_idle=True)
            for which, one in enumerate(self._sets)
            for share in shares_of_size(
                range(self._prompts[which]),
                max(1, self._slots // one.rules.samples_per_prompt),
            )
        ]
        self._idle = IdleEvaluation(
            state.step, state.policy_version, requests, self._supervisor.ended
        )
        state.evaluations.pending = state.step
        self._supervisor.fleet.order_all(Orders(keep_version=self.keeps))

    def turn(self, state: RunState) -> None:
        """Hands out and collects shares of the one beside training; gives it up if it is lost."""
        fleet, idle = self._supervisor.fleet, self._idle
        if idle is None:
            return
        idle.turn(fleet.ready())
        if idle.is_lost([worker for worker, _ in fleet.running()], state.policy_version):
            self._reports.say(
                f"step {idle.step}: its evaluation is left out: no worker holds policy version "
                f"{idle.policy_version} any more"
            )
            self.cancel(state)

    def cancel(self, state: RunState) -> None:
        """Gives up the one beside training."""
        if self._idle is not None:
            self._idle, state.evaluations.pending = None, None
            self._supervisor.fleet.order_all(Orders(keep_version=NO_VERSION))

    def _wait(self, state: RunState) -> dict[str, float]:
        """Waits for the one beside training, and returns its metrics."""
        started = time.monotonic()
        while self._idle is not None and not self._idle.complete:
            self._supervisor.turn()
        return self._take_result(state, waited_s=time.monotonic() - started)

    def _take_result(self, state: RunState, *, waited_s: float = 0.0) -> dict[str, float]:
        """Records the one beside training if it is complete; its metrics, or none.

        Args:
            waited_s: how long training has waited for it.
        """
        idle = self._idle
        if idle is None or not idle.complete:
            return {"time/eval_s": waited_s} if waited_s else {}
        self.cancel(state)  # its workers keep the version no longer
        return self._record(state, idle.step, idle.policy_version, idle.items(len(self._sets))) | {
            "time/eval_s": waited_s
        }

    def evaluate(self, state: RunState) -> dict[str, float]:
        """Scores the prompts under the current version while training waits.

        Returns:
            metrics of the step.
        """
        started = time.monotonic()
        version = state.policy_version
        completed = [self._complete(which, version) for which in range(len(self._sets))]
        metrics = self._record(state, state.step, version, completed)
        return metrics | {"time/eval_s": time.monotonic() - started}

    def _record(
        self,
        state: RunState,
        step: int,
        policy_version: int,
        completed: Sequence[Sequence[EvalItem]],
    ) -> dict[str, float]:
        evaluated = Evaluated(
            step=step, policy_version=policy_version, recorded_at=state.step, completed=completed
        )
        return record_evaluation(self._sets, evaluated, state.evaluations, self._reports)

    def _request(
        self, which: int, positions: Sequence[int], policy_version: int, *, when_idle: bool = False
    ) -> EvalRequest:
        rules = self._sets[which].rules
        return EvalRequest(
            held_out=which,
            positions=positions,
            policy_version=policy_version,
            samples=rules.samples_per_prompt,
            sampling=rules.sampling,
            timeout_s=self._timeout_s,
            when_idle=when_idle,
        )

    def _complete(self, which: int, policy_version: int) -> list[EvalItem]:
        """Completes and scores one set; each worker gets a share of the positions."""
        supervisor, fleet = self._supervisor, self._supervisor.fleet
        waiting = deque(shares(range(self._prompts[which]), max(1, len(fleet.ready()))))
        running: dict[Call[list[EvalItem]], tuple[Worker, WorkerHandle, list[int], float]] = {}
        results: list[EvalItem] = []
        try:
            while waiting or running:
                busy = [handle for _, handle, _, _ in running.values()]
                for worker in fleet.ready():
                    handle = worker.handle
                    if waiting and handle is not None and handle not in busy:
                        share = waiting.popleft()
                        call = handle.evaluate(self._request(which, share, policy_version))
                        end_s = supervisor.clock.now() + self._timeout_s
                        running[call] = (worker, handle, share, end_s)
                        worker.evaluates = True
                ended = supervisor.turn(running)
                now = supervisor.clock.now()
                over = [c for c, (*_, end_s) in running.items() if c in ended or now > end_s]
                for call in over:
                    worker, handle, share, _ = running.pop(call)
                    try:
                        if call not in ended:
                            raise NoAnswer(
                                f"{worker.name} did not finish evaluate in {self._timeout_s:g} s"
                            )
                        results += call.result()
                    except (ActorLost, ActorFailed, NoAnswer) as error:
                        waiting.append(share)
                        fleet.lost_while(worker, handle, error)
                    worker.evaluates = False
        finally:
            for worker, *_ in running.values():
                worker.evaluates = False
        return results
