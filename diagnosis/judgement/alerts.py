"""Alerts of a run in plain words: which stand, since when, and how urgent they are.

The rules are in `alert_rules.py` and `alert_rules_running.py`; here is their memory. Every trained
step is judged once, so that an alert has the step since which it stands.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from diagnosis.judgement import alert_rules as rules
from diagnosis.judgement.alert_rules import BAD, INFO, WARN, Finding, Rule, Scene
from diagnosis.judgement.alert_rules_running import RUNNING_RULES
from diagnosis.judgement.recent import WINDOW, Recent
from diagnosis.judgement.step_sides import Settling
from diagnosis.records.facts import RunSettings, StepFacts

RULES: dict[str, Rule] = {
    "learner_waits": rules.learner_waits,
    "workers_wait": rules.workers_wait,
    "compiles": rules.compiles,
    "unexplained": rules.unexplained,
    "weights": rules.weights,
    "zero_variance": rules.zero_variance,
    "truncated": rules.truncated,
    "aborted": rules.aborted,
    "reward_errors": rules.reward_errors,
    "disagreement": rules.disagreement,
    "entropy": rules.entropy,
    "reward_fell": rules.reward_fell,
    "grad_norm": rules.grad_norm,
    "nonfinite": rules.nonfinite,
    "skipped": rules.skipped,
    "clipped": rules.clipped,
    **RUNNING_RULES,
}
LONG = 100
FEWEST = 5
"""Trained steps before a rule is asked; what goes wrong at once shows in the first ones."""
AT_ONCE = ("nonfinite", "skipped", "restarts", "reward_errors", "canary", "receipts")
"""Rules that are asked from the first step on."""
SILENT_S = 60.0
"""No step for less than this is nothing to speak of."""
_ORDER = {BAD: 0, WARN: 1, INFO: 2}


@dataclasses.dataclass
class Alert:
    """One alert that stands."""

    id: str
    finding: Finding
    since_step: int

    def json(self) -> dict[str, Any]:
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

    def add(self, facts: StepFacts, *, judge: bool = True) -> None:
        """Takes the next step.

        Args:
            judge: whether the rules are asked; steps of long ago need not be judged.
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
        """Every alert that stands, worst first, the older of equals first.

        Args:
            now: Unix seconds.
            running: whether a step should come; in a run that is over nobody waits for one.
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

    def _silence(self, now: float) -> Finding | None:
        """No step for five times as long as a step usually takes, and a minute at least."""
        if self._last_time is None:
            return None
        silent_s = now - self._last_time
        recent = list(self._long)[-WINDOW:]
        usual_s = statistics.median(f.wall_s for f in recent) if recent else SILENT_S
        longest_s = max((f.wall_s for f in self._long), default=0.0)
        if silent_s < max(SILENT_S, 5 * usual_s, 1.5 * longest_s):
            return None
        severity = BAD if silent_s > max(5 * SILENT_S, 10 * usual_s) else WARN
        return Finding(
            severity,
            f"no step for {silent_s:.0f} s; a step usually takes {usual_s:.1f} s",
            "see in Fleet who is at work: a process may compile, restart, evaluate or hang; "
            "placement.step_timeout_s bounds the wait",
            "fleet",
        )


def worst(alerts: list[Mapping[str, Any]]) -> str:
    """The severity of the worst alert; empty without one."""
    return min((alert["severity"] for alert in alerts), key=lambda s: _ORDER[s], default="")
