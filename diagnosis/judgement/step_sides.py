"""The two sides of a step as the step-time model takes them, and which steps may be compared.

A step's seconds leave out evaluations and checkpoints: no setting that the model knows changes
those. A step is settled when every worker in it has worked before and nothing compiled: a process
that starts or compiles takes time that the next step will not take, and nobody knows what one did
that did not tell.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from diagnosis.records.facts import LEARNER, RunSettings, StepFacts

ODD_SHARE = 0.01
"""Of the wall time; who compiles, or is not there, for less than this does not unsettle a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """One settled step, or the medians of several."""

    workers: int
    step_s: float
    """Wall time without evaluation and checkpoint."""
    update_s: float
    """Of the learner, for this step's update."""
    rollout_s: float
    """Until the last group was there, had the workers begun with the step; `work_s` included."""
    work_s: float
    """Prefill, decode and scoring of the busiest worker: what more workers would share."""
    tokens: float
    """Completion tokens of the step; NaN, as in the next four, where it is not known."""
    completion_len_mean: float
    completion_len_max: float
    prompt_len_mean: float
    beyond_half: float
    """Share of completion tokens beyond half the maximum length."""

    @property
    def fixed_s(self) -> float:
        """What of the rollout side does not shrink with the work: weights, swaps, hand-overs."""
        return max(0.0, self.rollout_s - self.work_s)

    @property
    def work_s_per_token(self) -> float:
        return self.work_s / self.tokens if self.tokens > 0 else self.work_s

    def at_length(self, tokens: float, mean: float, settings: RunSettings) -> "Sides":
        """The same step, had its completions had so many tokens in all and on the mean.

        The work goes with the tokens that are drawn, the update with those that it reads, prompts
        included; where a length is not known, its side stays as it is.
        """
        work_s = self.work_s * _ratio(tokens, self.tokens)
        prompt = 0.0 if math.isnan(self.prompt_len_mean) else self.prompt_len_mean
        update_s = self.update_s * _ratio(prompt + mean, prompt + self.completion_len_mean)
        rollout_s = self.rollout_s + work_s - self.work_s
        before_s = both_s(self.update_s, self.rollout_s, settings)
        return dataclasses.replace(
            self,
            step_s=self.step_s + both_s(update_s, rollout_s, settings) - before_s,
            update_s=update_s,
            rollout_s=rollout_s,
            work_s=work_s,
            tokens=tokens,
            completion_len_mean=mean,
        )


def both_s(update_s: float, rollout_s: float, settings: RunSettings) -> float:
    """Seconds of the two sides: one after the other, or side by side."""
    if settings.max_staleness == 0:
        return rollout_s + update_s
    return max(rollout_s, update_s)


def sides_of(facts: StepFacts, settings: RunSettings) -> Sides:
    """Splits a trained step into its sides.

    In a synchronous step the driver's own waits are the sides: first for groups, then for the
    update. In an asynchronous one the waits hide what overlapped, so the busy seconds are.
    """
    eval_s = facts.metrics.get("time/eval_s", 0.0)
    learner_s = facts.phase_s(LEARNER, "checkpoint", "compile")
    step_s = max(1e-9, facts.wall_s - eval_s - facts.phase_s(LEARNER, "checkpoint"))
    work_s = max(
        (facts.phase_s(name, "prefill", "decode", "reward") for name in facts.workers), default=0.0
    )
    if settings.max_staleness == 0:
        update_s = facts.metric("time/train/update_s")
        rollout_s = max(work_s, facts.metrics.get("time/train/rollout_generate_s", 0.0))
    else:
        update_s = max(0.0, facts.busy_s(LEARNER) - learner_s)
        rollout_s = max((_rollout_s(facts, name) for name in facts.workers), default=0.0)
    return Sides(
        workers=len(facts.workers),
        step_s=step_s,
        update_s=update_s,
        rollout_s=rollout_s,
        work_s=work_s,
        tokens=facts.metric("rollout/tokens"),
        completion_len_mean=facts.metric("rollout/completion_len_mean"),
        completion_len_max=facts.metric("rollout/completion_len_max"),
        prompt_len_mean=facts.metric("rollout/prompt_len_mean"),
        beyond_half=facts.metric("rollout/tokens_beyond_half"),
    )


def _rollout_s(facts: StepFacts, worker: str) -> float:
    """Of an asynchronous step: work and weights; a wait longer than the pull is for the learner."""
    pulled_s = facts.metrics.get("weights/pull_s_max", 0.0)
    busy_s = facts.busy_s(worker) - facts.phase_s(worker, "eval", "compile")
    return busy_s + min(facts.phase_s(worker, "weights_wait"), pulled_s)


def median_sides(sides: Sequence[Sides]) -> Sides:
    """Medians field by field, over steps with the same number of workers; at least one step.

    They need not add up: `step_s` is seldom the sum of the others.
    """
    fields = [field.name for field in dataclasses.fields(Sides) if field.name != "workers"]
    medians = {name: _median([getattr(one, name) for one in sides]) for name in fields}
    return Sides(workers=sides[-1].workers, **medians)


def _ratio(then: float, now: float) -> float:
    return then / now if then > 0 and now > 0 else 1.0


def _median(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


class Settling:
    """Tells settled steps from others; is given every step of a run in order."""

    def __init__(self):
        self._workers: frozenset[str] = frozenset()
        self._proved: set[str] = set()
        """Workers that have worked since they were last seen to come."""
        self._restarts = 0.0

    def is_settled(self, facts: StepFacts, *, starting: bool = False) -> bool:
        """Whether this step's time says how long the next one takes.

        Args:
            starting: whether a process is known to start now.
        """
        workers = frozenset(facts.workers)
        changed = workers != self._workers
        self._proved &= workers
        new = workers - self._proved
        self._proved |= {name for name in new if facts.phase_s(name, "prefill", "decode") > 0}
        restarts = sum(
            facts.metrics.get(name, 0.0) for name in ("workers/restarts", "learner/restarts")
        )
        restarted, self._restarts = restarts != self._restarts, restarts
        self._workers = workers
        compiled = any(
            facts.phase_s(process, "compile") > ODD_SHARE * facts.wall_s
            for process in facts.processes
        )
        absent = any(s > ODD_SHARE * facts.wall_s for s in facts.absent_s.values())
        odd = changed or new or restarted or compiled or absent or starting
        return facts.trained and not odd
