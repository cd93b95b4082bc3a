"""Alerts on the processes: what they deliver, and how they hold up."""

import itertools
import statistics
from collections.abc import Sequence

from diagnosis.catalog.catalog import find
from diagnosis.judgement.alerts.rule import BAD, WARN, RuleFinding, Scene
from diagnosis.judgement.recent import percent
from diagnosis.records.facts import StepFacts

GROWTH_BYTES = 200e6
"""Smaller growth of a process raises no alert."""


def canary(scene: Scene) -> RuleFinding | None:
    """A worker computes other logprobs of a fixed text than the learner."""
    bound = scene.recent.settings.canary_bound or 0.1
    gap = scene.recent.greatest("canary/gap_max")
    if not gap > bound:
        return None
    return RuleFinding(
        BAD,
        "a worker and the learner compute different logprobs for the same fixed text: "
        f"{gap:.2g} nats apart, {bound:g} are allowed",
        "do not trust the results until the cause is found; weights.canary_bound makes workers "
        "refuse such weights",
        "trust",
    )


def stale(scene: Scene) -> RuleFinding | None:
    """More than 5 % of the groups were dropped because they were too old."""
    recent = scene.recent
    lost = recent.rise("groups/stale") + recent.rise("groups/dropped_stale")
    trained = sum(facts.groups.get("trained", 0) for facts in recent.steps)
    share = lost / max(1.0, lost + trained)
    if not scene.is_above(share, 0.05, 0.03):
        return None
    return RuleFinding(
        WARN,
        f"{lost:.0f} groups of the last {len(recent.steps)} steps were too old to train on, "
        f"{percent(share)} of all",
        f"raise rollout.max_staleness ({recent.settings.max_staleness} now), or use fewer workers",
        "trust",
    )


def receipts(scene: Scene) -> RuleFinding | None:
    """The learner refused groups of unknown weights or malformed ones."""
    risen = scene.recent.rise("groups/unknown_receipt") + scene.recent.rise("groups/malformed")
    if not risen:
        return None
    return RuleFinding(
        WARN,
        f"the learner refused {risen:.0f} groups of the last {len(scene.recent.steps)} steps: "
        "their weights were not issued by it, or their contents are inconsistent",
        "a few are usual after a restart of the learner; otherwise find the worker that sends them",
        "trust",
    )


def restarts(scene: Scene) -> RuleFinding | None:
    """A process was restarted."""
    recent = scene.recent
    workers, learner = recent.rise("workers/restarts"), recent.rise("learner/restarts")
    if not workers + learner:
        return None
    who = [f"workers {workers:.0f}"] if workers else []
    who += [f"learner {learner:.0f}"] if learner else []
    return RuleFinding(
        BAD if learner else WARN,
        f"restarts in the last {len(recent.steps)} steps: {', '.join(who)}",
        "Fleet shows the last error of each process; placement.worker_restarts and "
        "placement.learner_restarts limit the number of restarts",
        "fleet",
    )


def set_aside(scene: Scene) -> RuleFinding | None:
    """A prompt was set aside, since workers ended while they completed or scored it."""
    count = scene.recent.last.metric("rollout/prompts_set_aside")
    if not count > 0:
        return None
    return RuleFinding(
        WARN,
        f"{count:.0f} prompts are set aside and train no more: each has ended two workers, the "
        "second while it was there alone",
        "quarantine.json of the run's folder names them with the cause; look at what the scorer "
        "does with them",
        "fleet",
    )


def slow_worker(scene: Scene) -> RuleFinding | None:
    """One worker is busy 1.6 times as long as the others, and by a tenth of the step more."""
    names = scene.recent.last.workers
    steps = [f for f in scene.recent.steps if all(f.busy_s(name) > 0 for name in names)]
    if len(names) < 2 or len(steps) < 8:  # a new or restarted worker has not worked in all of them
        return None
    busy = {n: statistics.median(f.busy_s(n) / f.wall_s for f in steps) for n in names}
    slow = max(busy, key=lambda name: busy[name])
    others = statistics.median(share for name, share in busy.items() if name != slow)
    factor = busy[slow] / others if others > 0 else 0.0
    if not scene.is_above(factor, 1.6, 1.4) or busy[slow] - others < 0.1:
        return None
    return RuleFinding(
        WARN,
        f"{slow} is busy {percent(busy[slow])} of the step, the other workers {percent(others)}: "
        "all wait for it",
        f"compare its host and devices in Fleet; drain {slow} if its machine is slower",
        "fleet",
    )


def memory(scene: Scene) -> RuleFinding | None:
    """Memory of a process grew in each quarter of up to a hundred steps, by 20 % and 200 MB in all.

    Compilation and caches make single jumps; a leak keeps growing.
    """
    if len(scene.long) < 40:
        return None
    for name in scene.recent.names("mem/", "_bytes"):
        metric = find(name)
        if metric is None or name.endswith("peak_bytes"):
            continue
        quarters = _quarters(scene.long, name)
        if len(quarters) < 4 or any(b <= a for a, b in itertools.pairwise(quarters)):
            continue
        grown = quarters[3] - quarters[0]
        if grown > GROWTH_BYTES and grown > 0.2 * quarters[0]:
            process = name.split("/")[1]
            return RuleFinding(
                WARN,
                f"{metric.title} of {process} grew from {quarters[0] / 1e9:.2f} to "
                f"{quarters[3] / 1e9:.2f} GB within {len(scene.long)} steps and is still growing",
                "this looks like a leak, which ends the run when memory is used up: write a "
                "checkpoint, then drain the worker or resume the run",
                "fleet",
            )
    return None


def _quarters(steps: Sequence[StepFacts], name: str) -> list[float]:
    """The median of a metric in each quarter of the steps that has it."""
    size = len(steps) // 4
    quarters = [steps[i * size : (i + 1) * size] for i in range(4)]
    known = [[f.metrics[name] for f in quarter if name in f.metrics] for quarter in quarters]
    return [statistics.median(values) for values in known if values]
