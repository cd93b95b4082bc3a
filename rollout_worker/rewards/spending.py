"""What scorers spend at a service that is paid for: requests, tokens and their cost.

A scorer counts it in METER of its process, success or not. It goes with the next reply to the
worker, to the driver with the worker's next news, and there into `spending.json` and the metrics.
"""

import dataclasses
import math
import threading
import typing
from typing import Any

if typing.TYPE_CHECKING:
    from rollout_worker.config.reward_config import BudgetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spending:
    """A sum of what was spent."""

    requests: int = 0
    """Sent, those that were repeated included."""
    failed_requests: int = 0
    """Refused, dropped, failed, or given up at the time limit. Their tokens are not known."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """In the currency of the prices."""

    def __add__(self, other: "Spending") -> "Spending":
        one, two = dataclasses.asdict(self), dataclasses.asdict(other)
        return Spending(**{name: one[name] + two[name] for name in one})

    def __bool__(self) -> bool:
        return self != NOTHING

    def __str__(self) -> str:
        failed = f" ({self.failed_requests:,} failed)" if self.failed_requests else ""
        return f"{self.requests:,} requests{failed}, {self.tokens:,} tokens, cost {self.cost:.6g}"

    @property
    def tokens(self) -> int:
        """Of prompts and completions."""
        return self.prompt_tokens + self.completion_tokens

    @classmethod
    def parse(cls, value: Any) -> "Spending":
        """Reads the fields of one from JSON values.

        Raises:
            ValueError: if it is none.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"{str(value)[:80]} does not have the fields {sorted(names)}")
        for name, number in value.items():
            whole = type(number) is int or (name == "cost" and type(number) is float)
            if not whole or not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {number!r}")
        return cls(**value)


NOTHING = Spending()


class Meter:
    """Counts in a process that runs scorers."""

    def __init__(self):
        self._spent = Spending()

    def add_spending(self, spent: Spending) -> None:
        """Counts more."""
        self._spent += spent

    def take_spending(self) -> Spending:
        """What was counted since the last call."""
        spent, self._spent = self._spent, Spending()
        return spent


METER = Meter()
"""Of this process."""


class SpendingAccount:
    """What the scorers of one worker have spent, and whether they may go on; safe from any thread.

    The driver adds up all workers and says when the run's budget is spent. A worker stops by itself
    as well where it alone has spent that much.
    """

    def __init__(self, budget: "BudgetConfig | None" = None):
        self._budget = budget
        self._lock = threading.Lock()
        self._total = Spending()
        self._new = Spending()
        self._refusal = ""

    def add_spending(self, spent: Spending) -> None:
        """Counts more."""
        with self._lock:
            self._total += spent
            self._new += spent
            if self._budget is not None:
                self._refusal = self._refusal or over_budget(self._total, self._budget)

    def take_spending(self) -> Spending:
        """What was spent since the last call."""
        with self._lock:
            spent, self._new = self._new, Spending()
            return spent

    def stop(self, why: str) -> None:
        """Nothing more may be spent."""
        with self._lock:
            self._refusal = why

    @property
    def refusal(self) -> str:
        """Why nothing more may be spent; empty where it may."""
        return self._refusal


def over_budget(spent: Spending, budget: "BudgetConfig") -> str:
    """Which bound of a budget is reached, and what to do; empty where none is."""
    for name in ("cost", "tokens", "requests"):
        bound, value = getattr(budget, name), getattr(spent, name)
        if bound is not None and value >= bound:
            return (
                f"the run's budget is spent: reward.budget.{name}={bound:g}, spent {value:.6g}. "
                "To judge on, raise it and go on with --resume"
            )
    return ""
