"""What the evaluations of a run have found: accuracy by set and step, and the paired test of each
against the one before on the same prompts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from driver.accounting.accuracy import Accuracy, sign_test


@dataclasses.dataclass(frozen=True, kw_only=True)
class RightCounts:
    """How many completions of each prompt were right in one evaluation of one set."""

    step: int
    samples: int
    """Completions of each prompt."""
    correct_from: float
    """The reward from which one was right."""
    by_prompt: dict[int, int]
    """Right completions by prompt id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
    """Two evaluations of a set, compared prompt by prompt."""

    against: int
    """Step of the earlier one."""
    prompts: int
    """That both have."""
    better: int
    """Prompts with more right completions than before."""
    worse: int

    @property
    def p_value(self) -> float:
        """Of no change, by the exact sign test; with one completion a prompt, McNemar's."""
        return sign_test(self.better, self.worse)

    def __str__(self) -> str:
        return (
            f"against step {self.against} on the same {self.prompts} prompts: {self.better} "
            f"better, {self.worse} worse, p = {self.p_value:.3g} (exact sign test)"
        )


def paired(before: RightCounts | None, now: RightCounts) -> Paired | None:
    """Compares two evaluations; None where they did not ask the same."""
    if before is None or before.step >= now.step:
        return None
    if (before.samples, before.correct_from) != (now.samples, now.correct_from):
        return None
    both = before.by_prompt.keys() & now.by_prompt.keys()
    changes = [now.by_prompt[one] - before.by_prompt[one] for one in both]
    return Paired(
        against=before.step,
        prompts=len(both),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
    )


class Evaluations:
    """The results of a run so far; part of its state, which goes back to a checkpoint."""

    def __init__(self):
        self.accuracy: dict[str, dict[int, Accuracy | None]] = {}
        """By set and step; None where it is not known what is right. The only set of a run has the
        name ''."""
        self._newest: dict[str, RightCounts] = {}
        self.pending: int | None = None
        """Step whose evaluation is under way beside training."""

    def has_step(self, step: int) -> bool:
        """Whether a step was evaluated."""
        return any(step in by_step for by_step in self.accuracy.values())

    def scores(self) -> dict[int, float | None]:
        """Accuracy of the run's first set by step, of the steps where it is known; None while an
        evaluation is under way.
        """
        first = next(iter(self.accuracy.values()), {})
        known: dict[int, float | None] = {
            step: found.correct / found.total for step, found in first.items() if found is not None
        }
        return known if self.pending is None else {self.pending: None, **known}

    def add(
        self, name: str, step: int, accuracy: Accuracy | None, counts: RightCounts | None
    ) -> Paired | None:
        """Adds the evaluation of one set after a step.

        Args:
            counts: None where it is not known what is right.

        Returns:
            the comparison with the newest evaluation before that can be compared.
        """
        self.accuracy.setdefault(name, {})[step] = accuracy
        if counts is None:
            return None
        found = paired(self._newest.get(name), counts)
        self._newest[name] = counts
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values."""
        sets = {
            name: {
                "accuracy": [
                    [step, *(dataclasses.astuple(found) if found else ())]
                    for step, found in by_step.items()
                ],
                "newest": self._counts_state(name),
            }
            for name, by_step in self.accuracy.items()
        }
        return {"sets": sets, "pending": self.pending}

    def _counts_state(self, name: str) -> dict[str, Any] | None:
        counts = self._newest.get(name)
        # Keys of a JSON object are texts.
        return counts and {**vars(counts), "by_prompt": [*counts.by_prompt.items()]}

    @classmethod
    def restore(cls, kept: Mapping[str, Any]) -> "Evaluations":
        """From the state of the driver in a checkpoint; older ones have the accuracy of one set."""
        found = cls()
        state: Any = kept.get("evaluations")
        if state is None:
            state = {"sets": {"": {"accuracy": kept["accuracy"]}} if kept["accuracy"] else {}}
        found.pending = state.get("pending")
        for name, one in state["sets"].items():
            found.accuracy[name] = {
                step: Accuracy(correct=counts[0], total=counts[1], correct_from=(*counts, 1.0)[2])
                if counts
                else None
                for step, *counts in one["accuracy"]
            }
            if newest := one.get("newest"):
                by_prompt = {prompt: right for prompt, right in newest["by_prompt"]}
                found._newest[name] = RightCounts(**{**newest, "by_prompt": by_prompt})
        return found
