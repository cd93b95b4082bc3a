"""Alerts on where the seconds of a step go."""

import dataclasses
import math
import statistics
from collections.abc import Callable

from diagnosis.judgement.alerts.rule import INFO, WARN, RuleFinding, Scene
from diagnosis.judgement.breakdown import (
    PHASE_GROUPS,
    busiest_worker,
    by_group,
    critical_path,
    waiting_share,
)
from diagnosis.judgement.recent import WINDOW, Recent, percent
from diagnosis.judgement.trust import worst_imbalance
from diagnosis.records.facts import StepFacts
from services.process.phases import LEARNER, UNEXPLAINED


def learner_waits(scene: Scene) -> RuleFinding | None:
    """The learner waits for rollouts for more than 40 % of a step."""
    recent, settings = scene.recent, scene.recent.settings
    share = recent.median_of(lambda facts: waiting_share(facts, LEARNER))
    if not scene.is_above(share, 0.40, 0.33):
        return None
    advice = f"add a worker ({len(recent.last.workers)} now)"
    if settings.max_staleness == 0:
        advice += ", or raise rollout.max_staleness so that rollouts continue during the update"
    else:
        advice += f", or raise rollout.max_staleness ({settings.max_staleness} now)"
    if settings.colocated:
        advice = "placement.mode=separate gives the rollouts their own devices"
    text = f"the learner waits {percent(share)} of the step for rollouts"
    return RuleFinding(WARN, text, advice + "; What if estimates the step time", "what_if")


def workers_wait(scene: Scene) -> RuleFinding | None:
    """The busiest worker waits for the learner for most of a step.

    In a synchronous run each side waits while the other works: only three quarters are too much.
    """
    recent = scene.recent
    if not recent.last.workers or recent.settings.colocated:
        return None
    share = recent.median_of(lambda facts: waiting_share(facts, busiest_worker(facts) or LEARNER))
    limits = (0.75, 0.65) if recent.settings.max_staleness == 0 else (0.60, 0.50)
    if not scene.is_above(share, *limits):
        return None
    advice = "give the learner more devices or larger micro-batches"
    if len(recent.last.workers) > 1:
        advice = f"fewer workers are enough ({len(recent.last.workers)} now), or " + advice
    if recent.settings.max_staleness == 0:
        advice += "; rollout.max_staleness=1 lets them work during the update"
    text = f"even the busiest worker waits {percent(share)} of the step for the learner"
    return RuleFinding(INFO, text, advice, "breakdown")


def compiles(scene: Scene) -> RuleFinding | None:
    """A process compiled in more than four of ten steps."""
    recent = scene.recent
    for process in recent.last.processes:
        seconds = [facts.phase_s(process, "compile") for facts in recent.steps]
        count = sum(s > 0.01 * facts.wall_s for s, facts in zip(seconds, recent.steps, strict=True))
        if recent.is_full and scene.is_above(count, 4, 2):
            share = sum(seconds) / sum(facts.wall_s for facts in recent.steps)
            return RuleFinding(
                WARN,
                f"{process} compiled in {count} of the last {len(recent.steps)} steps, "
                f"{percent(share)} of their time",
                "array shapes change from step to step: limit them with "
                "rollout.decode.compile_budget and a fixed learner.microbatch_tokens",
                "breakdown",
            )
    return None


def unexplained(scene: Scene) -> RuleFinding | None:
    """More time than log.unexplained_fraction allows belongs to no phase."""
    recent, bound = scene.recent, scene.recent.settings.unexplained_fraction
    shares = {
        process: recent.median_of(lambda f, p=process: f.phase_s(p, UNEXPLAINED) / f.wall_s)
        for process in recent.last.processes
    }
    worst = max(shares, key=lambda process: shares[process], default="")
    if not worst or not scene.is_above(shares[worst], bound, 0.8 * bound):
        return None
    return RuleFinding(
        WARN,
        f"{percent(shares[worst])} of the time of {worst} belongs to no phase; "
        f"log.unexplained_fraction allows {percent(bound)}",
        "see its track in the Timeline; usual causes are a busy machine and a long garbage "
        "collection",
        "timeline",
    )


def weights(scene: Scene) -> RuleFinding | None:
    """Moving weights takes more than 15 % of the busiest worker's step."""
    share = scene.recent.median_of(_weights_share)
    if not scene.is_above(share, 0.15, 0.10):
        return None
    return RuleFinding(
        WARN,
        f"moving weights takes {percent(share)} of the step of the busiest worker",
        "weights.dtype=bfloat16 and weights.deltas=true send less; a deeper weights.relay_fanout "
        "tree and more weights.streams send it sooner",
        "fleet",
    )


def _weights_share(facts: StepFacts) -> float:
    worker = busiest_worker(facts)
    if worker is None:
        return 0.0
    pulled_s = facts.metrics.get("weights/pull_s_max", math.inf)
    waited_s = min(facts.phase_s(worker, "weights_wait"), pulled_s)
    return (waited_s + facts.phase_s(worker, "wire", "weights_swap")) / facts.wall_s


def ledger(scene: Scene) -> RuleFinding | None:
    """The phases of a process do not add up to the wall time of a step."""
    off, step, process = worst_imbalance(scene.recent)
    if not scene.is_above(off, 0.05, 0.03):
        return None
    return RuleFinding(
        WARN,
        f"step {step}: the phases of {process} are {percent(off)} off its wall time",
        "seconds were counted twice: the shares of that step are not exact",
        "breakdown",
    )


def step_time(scene: Scene) -> RuleFinding | None:
    """A step takes 1.5 times as long as in the baseline, after allowing for more tokens a step.

    Fewer tokens do not lower the expectation: part of a step does not depend on them.
    """
    alike = _alike(scene)
    if alike is None:
        return None
    before, now = _step_s(scene.baseline), _step_s(alike)
    usual = before * max(1.0, _tokens_ratio(scene.baseline, alike))
    if not scene.is_above(now / usual, 1.5, 1.3):
        return None
    were, are = _path_s(scene.baseline), _path_s(alike)
    grown = {group: are[group] - were[group] for group in PHASE_GROUPS}
    most = max(grown, key=lambda group: grown[group])
    return RuleFinding(
        WARN,
        f"a step takes {now:.2f} s, {now / usual:.1f} times the {usual:.2f} s expected for its "
        f"tokens (baseline: step {scene.baseline.steps[0].step} and later)",
        f"{most} on the critical path grew most, by {grown[most]:.2f} s: see the Breakdown; if "
        "every phase grew alike, the machine is slower, for example because others use it",
        "breakdown",
    )


def throughput(scene: Scene) -> RuleFinding | None:
    """Workers decode at less than 60 % of the baseline's rate, after allowing for fewer tokens.

    The rate falls with the number of tokens, since some seconds, as of the prefill, stay the same.
    """
    alike = _alike(scene)
    if alike is None:
        return None
    name = "throughput/train/decode_tokens_per_s"
    before, now = scene.baseline.median(name), alike.median(name)
    usual = before * min(1.0, _tokens_ratio(scene.baseline, alike))
    if not usual > 0 or not scene.is_below(now / usual, 0.60, 0.75):
        return None
    return RuleFinding(
        WARN,
        f"workers decode {now:.0f} tokens/s; {usual:.0f} are expected for this number of tokens "
        f"(baseline: step {scene.baseline.steps[0].step} and later)",
        "longer sequences read more cache; other causes are a shared machine, a throttled device "
        "or a slow worker",
        "fleet",
    )


def _alike(scene: Scene) -> Recent | None:
    """The recent steps with as many workers as the baseline; None if either has too few."""
    workers = len(scene.baseline.last.workers)
    steps = [facts for facts in scene.recent.steps if len(facts.workers) == workers]
    if not scene.recent.is_full or not scene.baseline.is_full or 2 * len(steps) <= WINDOW:
        return None
    return dataclasses.replace(scene.recent, steps=steps)


def _tokens_ratio(before: Recent, now: Recent) -> float:
    """Ratio of the tokens of a step; 1 if they are unknown."""
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


def saving(scene: Scene) -> RuleFinding | None:
    """Checkpoints take more than 10 % of the last hundred steps."""
    return _periodic(
        scene,
        "checkpoints",
        lambda facts: facts.phase_s(LEARNER, "checkpoint"),
        (0.10, 0.07),
        "raise checkpoint.every_steps, or use a faster disk",
    )


def evaluating(scene: Scene) -> RuleFinding | None:
    """Evaluations take more than 25 % of the last hundred steps."""
    return _periodic(
        scene,
        "evaluations",
        lambda facts: facts.metrics.get("time/eval_s", 0.0),
        (0.25, 0.20),
        "raise eval.every_steps, or lower eval.prompts",
    )


def _periodic(
    scene: Scene,
    what: str,
    seconds: Callable[[StepFacts], float],
    limits: tuple[float, float],
    advice: str,
) -> RuleFinding | None:
    """Judges work that comes every few steps, over up to the last hundred."""
    if len(scene.long) < 20:
        return None
    share = sum(map(seconds, scene.long)) / sum(facts.wall_s for facts in scene.long)
    if not scene.is_above(share, *limits):
        return None
    text = f"{what} take {percent(share)} of the last {len(scene.long)} steps"
    return RuleFinding(INFO, text, advice, "breakdown")
