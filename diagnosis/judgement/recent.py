"""The last trained steps of a run: judgements use several, so that no single step decides."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from diagnosis.records.facts import RunSettings, StepFacts

WINDOW = 10


@dataclasses.dataclass(frozen=True)
class Recent:
    """At most WINDOW trained steps, oldest first, at least one."""

    steps: Sequence[StepFacts]
    settings: RunSettings

    @property
    def last(self) -> StepFacts:
        """The newest step."""
        return self.steps[-1]

    @property
    def is_full(self) -> bool:
        """Whether there are WINDOW steps."""
        return len(self.steps) >= WINDOW

    def values(self, name: str) -> list[float]:
        """The measured values of a metric, without NaN."""
        found = (facts.metrics.get(name, math.nan) for facts in self.steps)
        return [value for value in found if not math.isnan(value)]

    def median(self, name: str) -> float:
        """Median of a metric; NaN if no step measured it."""
        values = self.values(name)
        return statistics.median(values) if values else math.nan

    def mean(self, name: str) -> float:
        """Mean of a metric; NaN if no step measured it."""
        values = self.values(name)
        return sum(values) / len(values) if values else math.nan

    def greatest(self, name: str) -> float:
        """Maximum of a metric; NaN if no step measured it."""
        return max(self.values(name), default=math.nan)

    def median_of(self, number: Callable[[StepFacts], float]) -> float:
        """Median of a number that is computed from each step."""
        return statistics.median(map(number, self.steps))

    def rise(self, name: str) -> float:
        """Increase of a counter within the steps; a decrease, as after a resume, counts as 0."""
        values = self.values(name)
        return sum(max(0.0, b - a) for a, b in itertools.pairwise(values))

    def names(self, start: str, end: str) -> list[str]:
        """Metrics of the last step with this start and end of the name."""
        return [name for name in self.last.metrics if name.startswith(start) and name.endswith(end)]

    def nonfinite(self) -> list[str]:
        """Names of metrics that were NaN or infinite in one of the steps."""
        return sorted(
            {
                name
                for facts in self.steps
                for name, value in facts.metrics.items()
                if not math.isfinite(value)
            }
        )


def percent(fraction: float) -> str:
    """`41 %`, with one decimal below ten. Halves are rounded up, as on the page."""
    value = fraction * 100
    if not math.isfinite(value):
        return f"{value} %"
    digits = 1 if 0 < abs(value) < 9.95 else 0
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:.{digits}f} %"
