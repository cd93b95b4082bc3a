"""What a run's scorers have spent at services that are paid for, and the budget of the run.

The sum is in `spending.json` of the run's folder, which no rollback to a checkpoint touches: what
was paid for stays paid when steps are taken again. What a worker has spent and not reported when it
dies is in no sum.
"""

import dataclasses
import json
import pathlib

from driver.errors import RunError
from rollout_worker.config.reward_config import BudgetConfig
from rollout_worker.rewards.spending import Spending, over_budget
from services.process.whole_file import write_whole

FILE = "spending.json"


class DamagedSpending(RunError):
    """The record of what a run has spent cannot be read."""


class RunSpending:
    """Owns `spending.json` of one run."""

    def __init__(self, folder: pathlib.Path, budget: BudgetConfig):
        """Reads what earlier starts of the run have spent.

        Raises:
            DamagedSpending: if the file is not as this class writes it.
        """
        self._path = folder / FILE
        self._budget = budget
        self._total = self._read() if self._path.is_file() else Spending()
        self._of_step = Spending()

    @property
    def total(self) -> Spending:
        """Of the run, all its starts together."""
        return self._total

    @property
    def refusal(self) -> str:
        """Why nothing more may be spent; empty where it may."""
        return over_budget(self._total, self._budget)

    def add_spending(self, spent: Spending) -> bool:
        """Counts what a worker reports; returns whether the budget is spent by that."""
        if not spent:
            return False
        before = self.refusal
        self._total += spent
        self._of_step += spent
        write_whole(self._path, json.dumps(dataclasses.asdict(self._total)), sync=False)
        return bool(self.refusal and not before)

    def take_step(self) -> Spending:
        """What was spent since the last call."""
        spent, self._of_step = self._of_step, Spending()
        return spent

    def _read(self) -> Spending:
        try:
            return Spending.parse(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise DamagedSpending(
                f"{self._path} is not as this program writes it ({error}): correct it, or remove "
                "it to count from 0"
            ) from error


def spending_metrics(step: Spending, total: Spending) -> dict[str, float]:
    """Of a step, and of the run up to its end; none where nothing was spent yet."""
    if not total:
        return {}
    return {
        "reward/judge/requests": float(step.requests),
        "reward/judge/failed_requests": float(step.failed_requests),
        "reward/judge/prompt_tokens": float(step.prompt_tokens),
        "reward/judge/completion_tokens": float(step.completion_tokens),
        "reward/judge/cost": step.cost,
        "reward/judge/requests_total": float(total.requests),
        "reward/judge/tokens_total": float(total.tokens),
        "reward/judge/cost_total": total.cost,
    }
