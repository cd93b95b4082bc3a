"""Rules behind the alerts on processes, memory and progress; see `alert_rules.py`."""

import dataclasses
import math
import statistics

from diagnosis.catalog.catalog import find
from diagnosis.judgement.alert_rules import BAD, INFO, WARN, Finding, Rule, Scene
from diagnosis.judgement.breakdown import PHASE_GROUPS, by_group, critical_path
from diagnosis.judgement.recent import WINDOW, Recent, percent
from diagnosis.judgement.trust import worst_imbalance
from diagnosis.records.facts import LEARNER, StepFacts

GROWTH_BYTES = 200e6
"""Growth of a process that is worth a word."""


def logprob_gap(scene: Scene) -> Finding | None:
    recent = scene.recent
    gap = recent.median("offpolicy/logprob_gap_mean")
    bound = 0.1 if recent.median("offpolicy/staleness_mean") > 0 else 0.02
    if not scene.beyond(gap, bound, 0.8 * bound):
        return None
    return Finding(
        BAD if gap > 5 * bound else WARN,
        f"learner and sampler differ by {gap:.2g} nats a token; usual are below {bound:g}",
        "the same compute_dtype on both sides, or algorithm.off_policy.token_truncate; a gap that "
        "comes at once is a wrong template, temperature or tensor",
        "trust",
    )


def canary(scene: Scene) -> Finding | None:
    bound = scene.recent.settings.canary_bound or 0.1
    gap = scene.recent.greatest("canary/gap_max")
    if not gap > bound:
        return None
    return Finding(
        BAD,
        f"a fixed text has other logprobs at a worker than at the learner: {gap:.2g} nats apart, "
        f"{bound:g} are allowed",
        "do not trust this run before you know why: weights.canary_bound makes workers refuse",
        "trust",
    )


def stale(scene: Scene) -> Finding | None:
    recent = scene.recent
    lost = recent.rise("groups/stale") + recent.rise("groups/dropped_stale")
    trained = sum(facts.groups.get("trained", 0) for facts in recent.steps)
    share = lost / max(1.0, lost + trained)
    if not scene.beyond(share, 0.05, 0.03):
        return None
    return Finding(
        WARN,
        f"{lost:.0f} groups of the last {len(recent.steps)} steps were too old to train on, "
        f"{percent(share)} of the work",
        f"raise rollout.max_staleness ({recent.settings.max_staleness} now), or fewer workers",
        "trust",
    )


def receipts(scene: Scene) -> Finding | None:
    risen = scene.recent.rise("groups/unknown_receipt") + scene.recent.rise("groups/malformed")
    if not risen:
        return None
    return Finding(
        WARN,
        f"the learner refused {risen:.0f} groups of the last {len(scene.recent.steps)} steps: "
        "weights that it never issued, or contents that do not fit together",
        "after a restart of the learner a few are usual; else find the worker that pushes them",
        "trust",
    )


def ledger(scene: Scene) -> Finding | None:
    off, step, process = worst_imbalance(scene.recent)
    if not scene.beyond(off, 0.05, 0.03):
        return None
    return Finding(
        WARN,
        f"step {step}: the phases of {process} are {percent(off)} off its wall time",
        "seconds are counted twice: read shares of that step with care",
        "breakdown",
    )


def restarts(scene: Scene) -> Finding | None:
    recent = scene.recent
    workers, learner = recent.rise("workers/restarts"), recent.rise("learner/restarts")
    if not workers + learner:
        return None
    who = [f"{workers:.0f} of the workers"] if workers else []
    who += [f"{learner:.0f} of the learner"] if learner else []
    return Finding(
        BAD if learner else WARN,
        f"restarts in the last {len(recent.steps)} steps: {' and '.join(who)}",
        "their last errors stand in Fleet; placement.worker_restarts and learner_restarts bound "
        "how often",
        "fleet",
    )


def slow_worker(scene: Scene) -> Finding | None:
    """One worker at work for 1.6 times as long as the others, and for a tenth of the step more."""
    names = scene.recent.last.workers
    steps = [f for f in scene.recent.steps if all(f.busy_s(name) > 0 for name in names)]
    if len(names) < 2 or len(steps) < 8:  # one that is new or starts anew has not worked in all
        return None
    busy = {n: statistics.median(f.busy_s(n) / f.wall_s for f in steps) for n in names}
    slow = max(busy, key=lambda name: busy[name])
    others = statistics.median(share for name, share in busy.items() if name != slow)
    factor = busy[slow] / others if others > 0 else 0.0
    if not scene.beyond(factor, 1.6, 1.4) or busy[slow] - others < 0.1:
        return None
    return Finding(
        WARN,
        f"{slow} is at work {percent(busy[slow])} of the step, the other workers "
        f"{percent(others)}: everybody waits for it",
        f"compare its host and devices in Fleet; drain {slow} if its machine is slower",
        "fleet",
    )


def step_time(scene: Scene) -> Finding | None:
    """Half as long again as the steps of the baseline, and as more tokens a step explain.

    Fewer tokens explain no shorter step: what does not go with them stays.
    """
    alike = _alike(scene)
    if alike is None:
        return None
    before, now = _step_s(scene.baseline), _step_s(alike)
    usual = before * max(1.0, _tokens_ratio(scene.baseline, alike))
    if not scene.beyond(now / usual, 1.5, 1.3):
        return None
    were, are = _path_s(scene.baseline), _path_s(alike)
    grown = {group: are[group] - were[group] for group in PHASE_GROUPS}
    most = max(grown, key=lambda group: grown[group])
    return Finding(
        WARN,
        f"a step takes {now:.2f} s, {now / usual:.1f} times the {usual:.2f} s that its tokens took "
        f"from step {scene.baseline.steps[0].step} on",
        f"{most} on the critical path grew most, by {grown[most]:.2f} s: see it in the Breakdown; "
        "where every phase grew alike, the machine is slower, as one that others use",
        "breakdown",
    )


def throughput(scene: Scene) -> Finding | None:
    """Six tenths of the rate of the baseline, and of what fewer tokens a step explain.

    The rate falls with the tokens where the seconds stay, as those of the prefill do.
    """
    alike = _alike(scene)
    if alike is None:
        return None
    name = "throughput/train/decode_tokens_per_s"
    before, now = scene.baseline.median(name), alike.median(name)
    usual = before * min(1.0, _tokens_ratio(scene.baseline, alike))
    if not usual > 0 or not scene.below(now / usual, 0.60, 0.75):
        return None
    return Finding(
        WARN,
        f"workers decode {now:.0f} tokens/s; for so many tokens it was {usual:.0f} from step "
        f"{scene.baseline.steps[0].step} on",
        "longer sequences read more cache; else a shared machine, a hot device or a slow worker",
        "fleet",
    )


def _alike(scene: Scene) -> Recent | None:
    """The recent steps that may be held against the baseline: those with as many workers, where
    both have enough of them.
    """
    workers = len(scene.baseline.last.workers)
    steps = [facts for facts in scene.recent.steps if len(facts.workers) == workers]
    if not scene.recent.is_full or not scene.baseline.is_full or 2 * len(steps) <= WINDOW:
        return None
    return dataclasses.replace(scene.recent, steps=steps)


def _tokens_ratio(before: Recent, now: Recent) -> float:
    """Of the tokens of a step; 1 where they are not known."""
    name = "rollout/tokens"
    ratio = now.median(name) / before.median(name) if before.median(name) > 0 else math.nan
    return 1.0 if math.isnan(ratio) else ratio


def _step_s(recent: Recent) -> float:
    return recent.median_of(
        lambda f: f.wall_s - f.metrics.get("time/eval_s", 0.0) - f.phase_s(LEARNER, "checkpoint")
    )


def _path_s(recent: Recent) -> dict[str, float]:
    """Median seconds of each group of phases on the critical path."""
    paths = [by_group(critical_path(facts)) for facts in recent.steps]
    return {g: statistics.median(path.get(g, 0.0) for path in paths) for g in PHASE_GROUPS}


def saving(scene: Scene) -> Finding | None:
    return _habit(
        scene,
        "checkpoints",
        lambda facts: facts.phase_s(LEARNER, "checkpoint"),
        (0.10, 0.07),
        "a larger checkpoint.every_steps, or a faster disk",
    )


def evaluating(scene: Scene) -> Finding | None:
    return _habit(
        scene,
        "evaluations",
        lambda facts: facts.metrics.get("time/eval_s", 0.0),
        (0.25, 0.20),
        "a larger eval.every_steps, or fewer eval.prompts",
    )


def _habit(scene: Scene, what: str, seconds, limits: tuple[float, float], advice: str):
    """What comes every few steps, over up to the last hundred."""
    if len(scene.long) < 20:
        return None
    share = sum(map(seconds, scene.long)) / sum(facts.wall_s for facts in scene.long)
    if not scene.beyond(share, *limits):
        return None
    text = f"{what} take {percent(share)} of the last {len(scene.long)} steps"
    return Finding(INFO, text, advice, "breakdown")


def memory(scene: Scene) -> Finding | None:
    """Growth of a process in each of four quarters of up to a hundred steps, by 20 % and 200 MB.

    Host memory jumps when something new is compiled or held; a leak goes on.
    """
    if len(scene.long) < 40:
        return None
    for name in scene.recent.names("mem/", "_bytes"):
        metric = find(name)
        if metric is None or name.endswith("peak_bytes"):
            continue
        parts = _quarters(scene.long, name)
        if len(parts) < 4 or any(b <= a for a, b in zip(parts, parts[1:], strict=False)):
            continue
        grown = parts[3] - parts[0]
        if grown > GROWTH_BYTES and grown > 0.2 * parts[0]:
            process = name.split("/")[1]
            return Finding(
                WARN,
                f"{metric.title} of {process} grew from {parts[0] / 1e9:.2f} to "
                f"{parts[3] / 1e9:.2f} GB within {len(scene.long)} steps, and goes on growing",
                "a leak ends a run when memory does: checkpoint, then drain the worker or resume",
                "fleet",
            )
    return None


def _quarters(steps, name: str) -> list[float]:
    size = len(steps) // 4
    parts: list[list[StepFacts]] = [list(steps[i * size : (i + 1) * size]) for i in range(4)]
    known = [[f.metrics[name] for f in part if name in f.metrics] for part in parts]
    return [statistics.median(values) for values in known if values]


RUNNING_RULES: dict[str, Rule] = {
    "logprob_gap": logprob_gap,
    "canary": canary,
    "stale": stale,
    "receipts": receipts,
    "ledger": ledger,
    "restarts": restarts,
    "slow_worker": slow_worker,
    "step_time": step_time,
    "throughput": throughput,
    "saving": saving,
    "evaluating": evaluating,
    "memory": memory,
}
