"""What an alert rule receives and returns.

A rule looks at the last ten trained steps and returns a finding or None. To keep an alert from
flickering when its number moves around the threshold, a rule has two: one that raises the alert
(`on`) and a milder one that clears it (`off`).
"""

import dataclasses
from collections.abc import Callable, Sequence

from diagnosis.judgement.recent import Recent
from diagnosis.records.facts import StepFacts

BAD, WARN, INFO = "bad", "warn", "info"


@dataclasses.dataclass(frozen=True)
class RuleFinding:
    """An alert without its history."""

    severity: str
    text: str
    advice: str
    view: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """The steps that a rule may use."""

    recent: Recent
    first: Recent
    """The first ten steps that trained and did not compile."""
    baseline: Recent
    """The first ten settled steps with the current number of workers."""
    long: Sequence[StepFacts]
    """Up to a hundred trained steps, those of `recent` included."""
    stands: bool = False
    """Whether this alert was raised after the previous step."""

    def is_above(self, value: float, on: float, off: float) -> bool:
        """Whether a value is high enough to raise the alert, or to keep it."""
        return value > (off if self.stands else on)

    def is_below(self, value: float, on: float, off: float) -> bool:
        """Whether a value is low enough to raise the alert, or to keep it."""
        return value < (off if self.stands else on)


Rule = Callable[[Scene], RuleFinding | None]
