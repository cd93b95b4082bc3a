"""The judgement on a run: bottleneck, alerts, trust, funnel and what if, as /api/judgement has it.

It reads no file and no clock. The caller adds each step once, in order.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from diagnosis.judgement.alerts.alerts import Alerts
from diagnosis.judgement.breakdown import bottleneck, usual_step_s, without_starts
from diagnosis.judgement.recent import WINDOW, Recent
from diagnosis.judgement.trust import trust
from diagnosis.judgement.what_if import WhatIf
from diagnosis.records.facts import RunSettings, StepFacts

JUDGED = 200
"""Steps that are judged for alerts if many come at once, as from a finished run: an alert that was
raised earlier is dated to the first of them."""
FUNNEL = ("generated", "scored", "nonzero_advantage", "unclipped", "contributed")


class Judge:
    """Follows one run."""

    def __init__(self, settings: RunSettings):
        self._settings = settings
        self._alerts = Alerts(settings)
        self._what_if = WhatIf(settings)
        self._recent: deque[StepFacts] = deque(maxlen=WINDOW)
        """Trained steps."""
        self._pending: deque[StepFacts] = deque()
        """Steps since the last verdict."""
        self._last_step = 0
        self._starting = False
        self._funnel: dict[str, float] | None = None

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        self._last_step = facts.step
        self._pending.append(facts)
        if len(self._pending) > JUDGED:
            self._alerts.add_step(self._pending.popleft(), judge=False)
        self._what_if.add_step(facts, starting=self._starting)
        if facts.trained:
            self._recent.append(facts)
        if all(f"funnel/{name}" in facts.metrics for name in FUNNEL):
            self._funnel = {name: facts.metrics[f"funnel/{name}"] for name in FUNNEL}
            self._funnel["step"] = facts.step

    def set_workers(self, *, starting: bool, hosts: int) -> None:
        """Takes what the driver reports of its workers.

        Args:
            starting: whether one of them is starting.
            hosts: on how many hosts they run; 0 if unknown, which leaves the number as it was.
        """
        self._starting = starting
        if hosts:
            self._what_if.set_hosts(hosts)

    def verdict(self, now: float, status: Mapping[str, Any]) -> dict[str, Any]:
        """The document of /api/judgement, with NaN and infinity as floats.

        Args:
            now: Unix seconds.
            status: of status.json; `state` is read.
        """
        while self._pending:
            self._alerts.add_step(self._pending.popleft())
        recent = Recent(tuple(self._recent), self._settings)
        found = bottleneck(without_starts(recent.steps))
        return {
            "time": now,
            "step": self._last_step,
            "progress": self._progress(status.get("state", "running") == "running"),
            "bottleneck": None
            if found is None
            else {
                "text": found.text,
                "process": found.process,
                "phase": found.phase,
                "share": found.share,
            },
            "alerts": self._alerts.all(now, running=status.get("state") == "running"),
            "trust": [check.json() for check in trust(recent)] if recent.steps else [],
            "funnel": self._funnel,
            "what_if": self._what_if.json(),
        }

    def _progress(self, goes_on: bool) -> dict[str, Any]:
        step, total = self._last_step, self._settings.steps
        fraction = min(1.0, step / total) if total else 0.0
        step_s = usual_step_s(tuple(self._recent))
        remaining_s = step_s * max(0, total - step) if total and goes_on else math.nan
        known = not math.isnan(remaining_s)
        text = f"step {step} of {total}" if total else f"step {step}"
        if known and remaining_s > 0:
            text += f", about {duration(remaining_s)} left"
        return {
            "step": step,
            "total": total,
            "fraction": fraction,
            "step_s": None if math.isnan(step_s) else step_s,
            "remaining_s": remaining_s if known else None,
            "text": text,
        }


def duration(seconds: float) -> str:
    """`3 h 20 min`, `4 min 10 s` or `25 s`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
