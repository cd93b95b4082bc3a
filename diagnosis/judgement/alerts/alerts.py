"""The alerts of a run: which are active, since which step, and how severe they are.

Every trained step is judged once, so that an alert knows the step at which it was raised.
"""

import dataclasses
import statistics
from collections import deque
from typing import Any

from diagnosis.judgement.alerts import learning_rules, process_rules, time_rules
from diagnosis.judgement.alerts.rule import BAD, INFO, WARN, Rule, RuleFinding, Scene
from diagnosis.judgement.recent import WINDOW, Recent
from diagnosis.judgement.settling import Settling
from diagnosis.records.facts import RunSettings, StepFacts

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        time_rules.learner_waits,
        time_rules.workers_wait,
        time_rules.compiles,
        time_rules.unexplained,
        time_rules.weights,
        learning_rules.zero_variance,
        learning_rules.truncated,
        learning_rules.aborted,
        learning_rules.reward_errors,
        learning_rules.disagreement,
        learning_rules.entropy,
        learning_rules.reward_fell,
        learning_rules.grad_norm,
        learning_rules.nonfinite,
        learning_rules.skipped,
        learning_rules.clipped,
        learning_rules.logprob_gap,
        process_rules.canary,
        process_rules.stale,
        process_rules.receipts,
        time_rules.ledger,
        process_rules.restarts,
        process_rules.set_aside,
        process_rules.slow_worker,
        time_rules.step_time,
        time_rules.throughput,
        time_rules.saving,
        time_rules.evaluating,
        process_rules.memory,
    )
}
"""By the id of the alert; alerts of equal severity and age are listed in this order."""
LONG = 100
FEWEST = 5
"""Trained steps before a rule is evaluated."""
AT_ONCE = ("nonfinite", "skipped", "restarts", "reward_errors", "canary", "receipts", "set_aside")
"""Rules that are evaluated from the first step on."""
SILENT_S = 60.0
"""A shorter time without a step raises no alert."""
_ORDER = {BAD: 0, WARN: 1, INFO: 2}


@dataclasses.dataclass
class Alert:
    """An active alert."""

    id: str
    finding: RuleFinding
    since_step: int

    def json(self) -> dict[str, Any]:
        """One of `alerts` of /api/judgement."""
        return {"id": self.id, **dataclasses.asdict(self.finding), "since_step": self.since_step}


class Alerts:
    """Follows a run step by step."""

    def __init__(self, settings: RunSettings):
        self._settings = settings
        self._long: deque[StepFacts] = deque(maxlen=LONG)
        self._first: list[StepFacts] = []
        self._settling = Settling()
        self._baseline: list[StepFacts] = []
        self._baseline_workers = 0
        self._last_step = 0
        self._last_time: float | None = None
        self.standing: dict[str, Alert] = {}

    def add_step(self, facts: StepFacts, *, judge: bool = True) -> None:
        """Takes the next step.

        Args:
            judge: whether the rules are evaluated; old steps only serve as history.
        """
        self._last_step, self._last_time = facts.step, facts.time
        if not facts.trained:
            return
        self._long.append(facts)
        settled = self._settling.is_settled(facts)
        if settled and len(self._first) < WINDOW:
            self._first.append(facts)
        if settled and len(facts.workers) != self._baseline_workers:
            self._baseline, self._baseline_workers = [], len(facts.workers)
        if settled and len(self._baseline) < WINDOW:
            self._baseline.append(facts)
        if judge:
            self._judge()

    def all(self, now: float, *, running: bool) -> list[dict[str, Any]]:
        """Every active alert: the most severe first, then the oldest.

        Args:
            now: Unix seconds.
            running: whether the run goes on, so that more steps are expected.
        """
        standing = list(self.standing.values())
        if running and (silent := self._silence(now)):
            standing.append(Alert("no_step", silent, self._last_step))
        standing.sort(key=lambda alert: (_ORDER[alert.finding.severity], alert.since_step))
        return [alert.json() for alert in standing]

    def _judge(self) -> None:
        recent = list(self._long)[-WINDOW:]
        first = self._first or recent
        scene = Scene(
            recent=Recent(recent, self._settings),
            first=Recent(first, self._settings),
            baseline=Recent(self._baseline or recent, self._settings),
            long=tuple(self._long),
        )
        standing: dict[str, Alert] = {}
        for name, rule in RULES.items():
            if len(self._long) < FEWEST and name not in AT_ONCE:
                continue
            before = self.standing.get(name)
            found = rule(dataclasses.replace(scene, stands=before is not None))
            if found is not None:
                since = before.since_step if before is not None else self._last_step
                standing[name] = Alert(name, found, since)
        self.standing = standing

    def _silence(self, now: float) -> RuleFinding | None:
        """No step for five times the usual step time, and for at least a minute."""
        if self._last_time is None:
            return None
        silent_s = now - self._last_time
        recent = list(self._long)[-WINDOW:]
        usual_s = statistics.median(f.wall_s for f in recent) if recent else SILENT_S
        longest_s = max((f.wall_s for f in self._long), default=0.0)
        if silent_s < max(SILENT_S, 5 * usual_s, 1.5 * longest_s):
            return None
        severity = BAD if silent_s > max(5 * SILENT_S, 10 * usual_s) else WARN
        return RuleFinding(
            severity,
            f"no step for {silent_s:.0f} s; a step usually takes {usual_s:.1f} s",
            "Fleet shows what each process does: it may compile, restart, evaluate or hang; "
            "placement.step_timeout_s limits the wait",
            "fleet",
        )
