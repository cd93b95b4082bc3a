"""Scores the held-out prompts of a run under one policy version."""

import time

from driver.accounting.accuracy import Accuracy
from driver.config.run_config import EvalConfig
from driver.reports.evaluation import (
    eval_metrics,
    greatest_reward,
    is_correct,
    is_due,
    threshold,
)
from driver.reports.step_report import StepReports
from driver.supervisor import Supervisor
from rollout_worker.worker_records import EvalRequest


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
        items = self._supervisor.evaluate(
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
