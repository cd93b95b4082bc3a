"""What a rule of the post-mortem is, and what it returns.

A rule is a function of the facts that returns a cause or None. Weights say how sure it is: from 90
the evidence names the cause, below 50 it is a guess.
"""

import dataclasses
from collections.abc import Callable, Sequence

from driver.postmortem.run_facts import SHOWN_LINES, Facts, first_match, matching


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """One explanation."""

    name: str
    weight: int
    """0 to 100."""
    title: str
    """One sentence."""
    evidence: tuple[str, ...]
    next_step: str


Rule = Callable[[Facts], Cause | None]


def cause_of(name: str, weight: int, title: str, evidence: Sequence[str], next_step: str) -> Cause:
    """A cause with its evidence kept to what fits on a page."""
    shown = tuple(line for line in evidence if line)[: 2 * SHOWN_LINES]
    return Cause(name=name, weight=weight, title=title, evidence=shown, next_step=next_step)


@dataclasses.dataclass(frozen=True)
class PatternRule:
    """A rule that searches for a pattern in what processes reported."""

    name: str
    weight: int
    pattern: str
    title: str
    """May use the pattern's named groups."""
    next_step: str

    def __call__(self, facts: Facts) -> Cause | None:
        """Applies the rule."""
        match = first_match(self.pattern, facts.reported)
        if not match:
            return None
        named = {name: value or "one not named" for name, value in match.groupdict().items()}
        title = self.title.format_map(named)
        # The last error of a worker may follow from the end of another process.
        by_worker = match.string not in (facts.error, *facts.details.splitlines())
        weight = self.weight - 15 * by_worker
        return cause_of(
            self.name, weight, title, matching(self.pattern, facts.reported), self.next_step
        )
