"""Upper bounds on what the compiler says of each TPU program, and their comparison.

`budgets.json` has the bounds, set about 5 % above what was reached, and the versions of the
compiler that reached it: another one may break them without a change of ours.
"""

import json
import pathlib
from typing import Any, NamedTuple

FILE = pathlib.Path(__file__).with_name("budgets.json")
FIGURES = ("temp_bytes", "peak_bytes", "accessed_bytes", "cycles", "model_ms")
"""What a program may have a budget for; any may be absent."""


class Budgets(NamedTuple):
    """The committed bounds."""

    libtpu: str
    """Version that they were set with."""
    programs: dict[str, dict[str, float]]


class BudgetCheck(NamedTuple):
    """One figure beside its bound."""

    figure: str
    reached: float | None
    """None where it was not measured this time."""
    budget: float | None

    @property
    def verdict(self) -> str:
        """`held`, `BROKEN`, `no budget` or `not measured`."""
        if self.budget is None:
            return "no budget"
        if self.reached is None:
            return "not measured"
        return "held" if self.reached <= self.budget else "BROKEN"


def load_budgets(path: pathlib.Path = FILE) -> Budgets:
    """Reads the bounds.

    Raises:
        ValueError: if a program has a budget for a figure that does not exist.
    """
    document = json.loads(path.read_text())
    for name, budget in document["programs"].items():
        unknown = sorted(set(budget) - set(FIGURES))
        if unknown:
            raise ValueError(f"{path.name}: {name} has a budget for {unknown}; know {FIGURES}")
    return Budgets(document["libtpu"], document["programs"])


def check_figures(figures: dict[str, Any], budget: dict[str, float]) -> list[BudgetCheck]:
    """Every figure that was measured or has a bound.

    Args:
        figures: of FIGURES those that were measured, by name.
        budget: of FIGURES those that have a bound.
    """
    return [
        BudgetCheck(name, figures.get(name), budget.get(name))
        for name in FIGURES
        if name in figures or name in budget
    ]
