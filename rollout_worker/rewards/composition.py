"""How the rewards of several functions become the total of a completion."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from rollout_worker.config.reward_config import RewardFunctionConfig

Combine = Literal["sum", "product"]

_MOST = 1e12
"""Largest absolute total; that of one reward with one weight, both as large as they may be."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """A rule that makes a total; variants of rewards have no part in it."""

    combine: Combine
    weights: dict[str, float]
    """By function; one of weight 0 is only logged, though it may be a gate."""
    gates: dict[str, float]
    """By function that is a gate: the least reward at which it is open."""

    @classmethod
    def of(cls, functions: Sequence[RewardFunctionConfig], combine: Combine) -> "Composition":
        """As configured."""
        return cls(
            combine,
            {function.name: function.weight for function in functions},
            {function.name: function.gate for function in functions if function.gate is not None},
        )

    def total(self, rewards: Mapping[str, float]) -> float:
        """The total of one completion: the sum or the product of its rewards, each with its weight.

        Where a gate is closed, the functions that are no gate count as if their reward was 0.

        Args:
            rewards: of every function, by name.

        Raises:
            ValueError: if the total is beyond 1e12.
        """
        is_open = all(rewards[name] >= least for name, least in self.gates.items())
        terms = [
            weight * (rewards[name] if is_open or name in self.gates else 0.0)
            for name, weight in self.weights.items()
            if weight
        ]
        total = math.fsum(terms) if self.combine == "sum" else math.prod(terms)
        if not abs(total) <= _MOST:
            raise ValueError(
                f"the {self.combine} of the rewards is {total:g}, but a total must lie between "
                f"-{_MOST:g} and {_MOST:g}: lower the rewards or their weights"
            )
        return total

    def __str__(self) -> str:
        """The rule in one line, such as `format x 0 (gate from 1) + gsm8k_answer x 1`."""
        terms = []
        for name, weight in self.weights.items():
            gate = f" (gate from {self.gates[name]:g})" if name in self.gates else ""
            terms.append(f"{name} x {weight:g}{gate}")
        return (" + " if self.combine == "sum" else " times ").join(terms)
