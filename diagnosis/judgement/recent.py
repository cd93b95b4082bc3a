"""The last trained steps of a run, as the judgements look at them: no one noisy step decides."""

import dataclasses
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
        return self.steps[-1]

    @property
    def is_full(self) -> bool:
        """Whether there are enough steps for a judgement on a habit rather than on a start."""
        return len(self.steps) >= WINDOW

    def values(self, name: str) -> list[float]:
        """Of the steps that measured it, without NaN."""
        found = (facts.metrics.get(name, math.nan) for facts in self.steps)
        return [value for value in found if not math.isnan(value)]

    def median(self, name: str) -> float:
        """NaN where no step measured it."""
        values = self.values(name)
        return statistics.median(values) if values else math.nan

    def mean(self, name: str) -> float:
        """NaN where no step measured it."""
        values = self.values(name)
        return sum(values) / len(values) if values else math.nan

    def greatest(self, name: str) -> float:
        """NaN where no step measured it."""
        return max(self.values(name), default=math.nan)

    def median_of(self, number: Callable[[StepFacts], float]) -> float:
        """The median of a number that is made of a step."""
        return statistics.median(map(number, self.steps))

    def rise(self, name: str) -> float:
        """By how much a counter rose within the steps; a fall, as after a resume, counts as 0."""
        values = self.values(name)
        return sum(max(0.0, b - a) for a, b in zip(values, values[1:], strict=False))

    def names(self, start: str, end: str) -> list[str]:
        """Metrics of the last step whose names start and end so."""
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
    """`41 %`; with a digit more below ten. Halves go up, as in the page's own numbers."""
    value = fraction * 100
    if not math.isfinite(value):
        return f"{value} %"
    digits = 1 if 0 < abs(value) < 9.95 else 0
    return f"{math.floor(value * 10**digits + 0.5) / 10**digits:.{digits}f} %"
