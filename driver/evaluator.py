"""Scores the held-out prompts of a run under one policy version."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence

from driver.accounting.accuracy import Accuracy
from driver.config.run_config import EvalConfig
from driver.fleet.actor_calls import ActorFailed, ActorLost, Call, NoAnswer
from driver.fleet.fleet_worker import Worker
from driver.fleet.handles import WorkerHandle
from driver.reports.evaluation import (
    eval_metrics,
    greatest_reward,
    is_correct,
    is_due,
    threshold,
)
from driver.reports.step_report import StepReports
from driver.supervisor import Supervisor
from rollout_worker.worker_records import EvalItem, EvalRequest


def shares(work: Sequence[int], workers: int) -> list[list[int]]:
    """Cuts work into one share for each worker, in order; the last may be smaller or none."""
    size = max(1, math.ceil(len(work) / workers))
    return [list(work[start : start + size]) for start in range(0, len(work), size)]


class Evaluator:
    """Knows when an evaluation is due, and how it is done."""

    def __init__(
        self,
        config: EvalConfig,
        supervisor: Supervisor,
        reports: StepReports,
        *,
        held_out: int,
        scorer: str,
        timeout_s: float,
    ):
        """Args:
        held_out: prompts that the data has for it.
        scorer: name of the reward function that decides what is right.
        timeout_s: bound of one worker's share.
        """
        self._config = config
        self._supervisor = supervisor
        self._reports = reports
        self._prompts = min(config.prompts or held_out, held_out)
        self._scorer = scorer
        self._timeout_s = timeout_s

    def is_due(self, step: int, steps: int) -> bool:
        """Whether the prompts are completed after a step; step 0 is before the first."""
        return is_due(step, steps, self._config)

    def evaluate(self, step: int, policy_version: int) -> tuple[dict[str, float], Accuracy | None]:
        """Scores the prompts under a version, and writes every completion down.

        Returns:
            metrics of the step, and how many completions were right; None where nobody said from
            which reward on one is.
        """
        started = time.monotonic()
        items = self._complete(
            EvalRequest(
                positions=range(self._prompts),
                policy_version=policy_version,
                samples=self._config.samples_per_prompt,
                sampling=self._config.sampling,
                timeout_s=self._timeout_s,
            )
        )
        items.sort(key=lambda item: (item.prompt_id, item.sample_index))
        scorer = self._scorer
        correct_from = threshold(items, scorer=scorer, chosen=self._config.correct_from)
        right = [
            None
            if correct_from is None
            else is_correct(item.rewards, scorer, "strict", correct_from)
            for item in items
        ]
        self._reports.write_evaluation(step, items, right)
        metrics = eval_metrics(
            items, scorer=scorer, pass_k=self._config.pass_k, correct_from=correct_from
        )
        metrics["time/eval_s"] = time.monotonic() - started
        if correct_from is None:
            self._reports.say(
                f"step {step}: no accuracy and no pass@k: {scorer} gave up to "
                f"{greatest_reward(items, scorer):g}, so 1 need not be right; set "
                "eval.correct_from to the reward from which an answer is"
            )
            return metrics, None
        correct = sum(map(bool, right))
        return metrics, Accuracy(correct=correct, total=len(items), correct_from=correct_from)

    def _complete(self, request: EvalRequest) -> list[EvalItem]:
        """Completes and scores held-out prompts; each worker gets a share of the positions."""
        supervisor, fleet = self._supervisor, self._supervisor.fleet
        waiting = deque(shares(request.positions, max(1, len(fleet.ready()))))
        running: dict[Call[list[EvalItem]], tuple[Worker, WorkerHandle, list[int], float]] = {}
        results: list[EvalItem] = []
        try:
            while waiting or running:
                busy = [handle for _, handle, _, _ in running.values()]
                for worker in fleet.ready():
                    handle = worker.handle
                    if waiting and handle is not None and handle not in busy:
                        share = waiting.popleft()
                        call = handle.evaluate(dataclasses.replace(request, positions=share))
                        end_s = supervisor.clock.now() + request.timeout_s
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
                                f"{worker.name} did not finish evaluate in {request.timeout_s:g} s"
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
