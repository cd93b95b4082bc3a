"""Predicted step times for other settings, and the errors of past predictions.

There are two kinds of past predictions. The time of every settled step is predicted from the steps
before it. When the number of workers changes, the time with the new number is predicted from the
steps before the change, and compared with the median of as many settled steps after it, corrected
to the same number of tokens: completion lengths change while a policy learns. Nothing is fitted to
the outcomes. Times exclude evaluations and checkpoints.
"""

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

from diagnosis.judgement.settling import Settling
from diagnosis.judgement.step_model import (
    ENOUGH,
    WINDOW,
    Forecast,
    Sides,
    StepModel,
    median_sides,
    sides_of,
)
from diagnosis.records.facts import RunSettings, StepFacts

PAST = 50
"""Predictions that the page shows."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One prediction and its outcome, in seconds a step."""

    step: int
    predicted: float
    actual: float

    @property
    def error(self) -> float:
        """Relative to the actual time; above 0 if the step was faster than predicted."""
        return (self.predicted - self.actual) / self.actual


@dataclasses.dataclass(frozen=True)
class Change(Prediction):
    """A prediction for another number of workers."""

    before: int
    after: int
    update_before_s: float
    """Of the learner before the change; the prediction assumes that it stays the same."""
    update_after_s: float
    """After the change. In a synchronous run no worker works during the update, so that a
    difference comes from the machine and not from the number of workers."""


@dataclasses.dataclass
class _Open:
    """A change whose outcome is not known yet."""

    step: int
    before: int
    after: int
    predicted: float
    level: Sides
    """Of the steps that the prediction is based on."""
    outcomes: list[Sides] = dataclasses.field(default_factory=list)


class WhatIf:
    """Follows a run step by step."""

    def __init__(self, settings: RunSettings):
        self._settings = settings
        self._settling = Settling()
        self._seen: dict[int, collections.deque[Sides]] = {}
        self._workers = 0
        """Of the last settled step; 0 before the first."""
        self._open: _Open | None = None
        self._hosts = 1
        self.past: collections.deque[Prediction] = collections.deque(maxlen=PAST)
        self.changes: list[Change] = []
        self.errors: list[float] = []
        """Relative errors, without sign, of every prediction made one step ahead."""

    def set_hosts(self, hosts: int) -> None:
        """Sets the number of hosts that the workers run on."""
        self._hosts = max(1, hosts)

    def add_step(self, facts: StepFacts, *, starting: bool = False) -> None:
        """Takes the next step: it is the outcome of predictions, and the basis of new ones.

        Args:
            starting: whether a process is starting now, according to the driver.
        """
        if not facts.trained:
            return
        settled = self._settling.is_settled(facts, starting=starting)
        if not settled or not facts.workers:
            return
        sides = sides_of(facts, self._settings)
        if not math.isfinite(sides.step_s + sides.update_s + sides.rollout_s):
            return
        if self._workers and sides.workers != self._workers:
            self._begin_change(facts.step, sides.workers)
        self._compare_outcome(facts.step, sides)
        self._seen.setdefault(sides.workers, collections.deque(maxlen=WINDOW)).append(sides)
        self._workers = sides.workers

    def json(self) -> dict[str, Any] | None:
        """`what_if` of the judgement; None before the first settled step."""
        if not self._workers:
            return None
        now = self._model().with_workers(self._workers, self._workers)
        return {
            "now": {
                "step_s": now.step_s,
                "workers": self._workers,
                "max_staleness": self._settings.max_staleness,
            },
            "options": self.options(),
            "error": self._error(),
            "past": [
                {"step": p.step, "predicted": p.predicted, "actual": p.actual, "error": p.error}
                for p in self.past
            ],
            "changes": [
                {
                    "step": change.step,
                    "from": change.before,
                    "to": change.after,
                    "predicted": change.predicted,
                    "actual": change.actual,
                    "error": change.error,
                }
                for change in self.changes[-PAST:]
            ],
        }

    def options(self) -> list[dict[str, Any]]:
        """Possible changes of settings, each with its predicted step time."""
        if not self._workers:
            return []
        model, n, settings = self._model(), self._workers, self._settings
        now_s = model.with_workers(n, n).step_s
        asked: list[tuple[str, str, Callable[[], Forecast]]] = []
        if not settings.colocated and n < settings.workers_max:
            asked.append(("more", f"{n + 1} workers", lambda: model.with_workers(n, n + 1)))
        if not settings.colocated and n > max(1, settings.workers_min):
            title = f"{n - 1} worker{'s' if n > 2 else ''}"
            asked.append(("fewer", title, lambda: model.with_workers(n, n - 1)))
        for staleness in (0, 1, 2):
            if staleness != settings.max_staleness:
                title = f"max_staleness {staleness}"
                call = functools.partial(model.with_staleness, n, staleness)
                asked.append((f"staleness_{staleness}", title, call))
        half = settings.max_completion_tokens // 2
        title = f"at most {half} tokens a completion"
        asked.append(("half_length", title, lambda: model.with_half_length(n)))
        return [_option(name, title, call(), now_s) for name, title, call in asked]

    def _model(self) -> StepModel:
        return StepModel(self._seen, self._settings, hosts=self._hosts)

    def _compare_outcome(self, step: int, sides: Sides) -> None:
        """Compares the predictions of this step with its time."""
        if predicted := self._predicted(sides.workers):
            made = Prediction(step, predicted, sides.step_s)
            self.past.append(made)
            self.errors.append(abs(made.error))
        change = self._open
        if change is not None:
            level = change.level
            change.outcomes.append(
                sides.at_length(level.tokens, level.completion_len_mean, self._settings)
            )
            if len(change.outcomes) == WINDOW:
                self._end_change()

    def _predicted(self, workers: int) -> float | None:
        """The predicted time of the next step with this number of workers."""
        if len(self._seen.get(workers, ())) >= ENOUGH:
            return statistics.median(sides.step_s for sides in self._seen[workers])
        if not self._workers:
            return None
        return self._model().with_workers(self._workers, workers).step_s

    def _begin_change(self, step: int, workers: int) -> None:
        self._end_change()
        self._open = None
        if len(self._seen[self._workers]) >= ENOUGH:
            predicted = self._model().with_workers(self._workers, workers).step_s
            level = median_sides(self._seen[self._workers])
            self._open = _Open(step, self._workers, workers, predicted, level)

    def _end_change(self) -> None:
        change = self._open
        if change is not None and len(change.outcomes) >= ENOUGH:
            found = median_sides(change.outcomes)
            self.changes.append(
                Change(
                    step=change.step,
                    predicted=change.predicted,
                    actual=found.step_s,
                    before=change.before,
                    after=change.after,
                    update_before_s=change.level.update_s,
                    update_after_s=found.update_s,
                )
            )
            self._open = None

    def _error(self) -> dict[str, Any]:
        """Median error of the predictions over the run."""
        if not self.errors:
            return {
                "median": None,
                "count": 0,
                "text": "no prediction has been compared with a step yet",
            }
        median = statistics.median(self.errors)
        text = (
            f"{len(self.errors)} predictions of the next step have a median error of "
            f"{median * 100:.1f} %"
        )
        if self.changes:
            of_changes = statistics.median(abs(change.error) for change in self.changes)
            times = "time" if len(self.changes) == 1 else "times"
            text += (
                f"; the number of workers changed {len(self.changes)} {times}, with a median "
                f"error of {of_changes * 100:.1f} %"
            )
        return {"median": median, "count": len(self.errors), "text": text}


def _option(name: str, title: str, forecast: Forecast, now_s: float) -> dict[str, Any]:
    return {
        "id": name,
        "title": title,
        "step_s": forecast.step_s,
        "ratio": forecast.step_s / now_s,
        "note": forecast.note,
        "sure": "measured" if forecast.measured else "model",
    }
