"""How long a step would take with other settings: the model behind the What-if view.

A step has two sides. The rollout side takes R(n) = fixed + work(n) seconds with n workers, the
update takes U. A synchronous step takes R + U + rest. An asynchronous one takes max(R, U) + rest if
the sides have their own hardware; the gain is smaller if they share it. Evaluations and checkpoints
are left out of the step time, since no setting of the model changes them.

Measurements of this run come first: the work with n workers if it has had n workers, else the
scalability between two other numbers of workers. Without either, the model uses the priors below,
each with its reason.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from diagnosis.records.facts import RunSettings, StepFacts
from services.process.phases import LEARNER

WORK = ("prefill", "decode", "reward", "environment")
"""Phases of the work that more workers would share."""
WINDOW = 10
"""Settled steps with one number of workers that enter the medians."""
ENOUGH = 3
"""Settled steps needed to count a number of workers as measured."""
SHARED_SCALABILITY = 0.3
"""Prior exponent of work over the share of the work, for workers that share a host's CPU cores. The
XLA threads of one worker already use all of them; a second worker only uses the time in which the
first is in Python or waits for scores, which is about a third."""
OWN_OVERLAP = 0.95
"""Prior share of the shorter side that overlaps with the longer one if both have their own devices;
transfers do not overlap."""
SHARED_OVERLAP = 0.3
"""The same if both sides share the CPU cores of a host, for the reason above."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """One settled step, or the medians of several."""

    workers: int
    step_s: float
    """Wall time without evaluation and checkpoint."""
    update_s: float
    """Of the learner, for this step's update."""
    rollout_s: float
    """From the start of the step until the last group arrived; includes `work_s`."""
    work_s: float
    """Prefill, decode, scoring and environments of the busiest worker: the work that more workers
    would share."""
    tokens: float
    """Completion tokens of the step; this and the next four are NaN if unknown."""
    completion_len_mean: float
    completion_len_max: float
    prompt_len_mean: float
    beyond_half: float
    """Share of completion tokens beyond half the maximum length."""

    @property
    def fixed_s(self) -> float:
        """Rollout time that does not depend on the work: weights, swaps, transfers."""
        return max(0.0, self.rollout_s - self.work_s)

    @property
    def work_s_per_token(self) -> float:
        """Work per completion token; all of the work if the tokens are unknown."""
        return self.work_s / self.tokens if self.tokens > 0 else self.work_s

    def at_length(self, tokens: float, mean: float, settings: RunSettings) -> "Sides":
        """The same step with another total number of completion tokens and mean length.

        The work is proportional to the tokens drawn, the update to the tokens read, prompts
        included; if a length is unknown, its side stays the same.
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

    In a synchronous step the sides are the driver's waits: first for groups, then for the update.
    In an asynchronous step waits do not show what overlapped, so the sides are the busy seconds.
    """
    eval_s = facts.metrics.get("time/eval_s", 0.0)
    learner_s = facts.phase_s(LEARNER, "checkpoint", "compile")
    step_s = max(1e-9, facts.wall_s - eval_s - facts.phase_s(LEARNER, "checkpoint"))
    work_s = max((facts.phase_s(name, *WORK) for name in facts.workers), default=0.0)
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
    """Of an asynchronous step: work and weights; waiting beyond the pull is for the learner."""
    pulled_s = facts.metrics.get("weights/pull_s_max", 0.0)
    busy_s = facts.busy_s(worker) - facts.phase_s(worker, "eval", "compile")
    return busy_s + min(facts.phase_s(worker, "weights_wait"), pulled_s)


def median_sides(sides: Sequence[Sides]) -> Sides:
    """Medians field by field, over steps with the same number of workers; at least one step.

    They need not add up to `step_s`.
    """
    fields = [field.name for field in dataclasses.fields(Sides) if field.name != "workers"]
    medians = {name: _median([getattr(one, name) for one in sides]) for name in fields}
    return Sides(workers=sides[-1].workers, **medians)


def _ratio(then: float, now: float) -> float:
    return then / now if then > 0 and now > 0 else 1.0


def _median(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A predicted step."""

    step_s: float
    measured: bool
    """Whether the run itself has used that configuration."""
    note: str


class StepModel:
    """Predictions from the measured steps of a run."""

    def __init__(
        self, seen: Mapping[int, Sequence[Sides]], settings: RunSettings, *, hosts: int = 1
    ):
        """Args:
        seen: settled steps, oldest first, by number of workers; at least one step.
        hosts: how many hosts the workers are known to run on.
        """
        self._seen = {n: list(steps)[-WINDOW:] for n, steps in seen.items() if steps}
        self._level = {n: median_sides(steps) for n, steps in self._seen.items()}
        self._settings = settings
        self._is_shared = settings.platform == "cpu" and hosts <= 1

    def with_workers(self, now: int, then: int) -> Forecast:
        """From `now` workers, which the run has used, to `then`."""
        level = self._level[now]
        if then == now:
            return Forecast(level.step_s, True, "current setting")
        work_s, measured, note = self._work_s(now, then)
        fixed_s = self._level[then].fixed_s if measured else level.fixed_s
        rollout_s = fixed_s + work_s
        return Forecast(self._together(level, level.update_s, rollout_s), measured, note)

    def with_staleness(self, now: int, then: int) -> Forecast:
        """With `now` workers and another rollout.max_staleness."""
        level, steps = self._level[now], self._seen[now]
        staleness = self._settings.max_staleness
        if then == staleness:
            return Forecast(level.step_s, True, "current setting")
        longer = max(level.rollout_s, level.update_s)
        shorter = min(level.rollout_s, level.update_s)
        hidden = self._overlap()
        share = f"{hidden:.0%} of the shorter side".replace("%", " %")
        rest_s = self._rest_s(level)
        if then == 0:
            return Forecast(
                longer + hidden * shorter + rest_s,
                False,
                f"rollouts and update run one after the other; {share} is assumed to overlap now",
            )
        if staleness == 0:
            longer = _paired(steps) if then == 1 else longer
            return Forecast(
                longer + (1 - hidden) * shorter + rest_s,
                False,
                f"rollouts continue during the update; {share} is assumed to overlap",
            )
        if then == 1:
            longer = _paired(steps)
        elif staleness == 1:
            rest_s = level.step_s - _paired(steps)
        return Forecast(
            longer + rest_s,
            False,
            "a deeper queue only evens out differences between steps",
        )

    def with_half_length(self, now: int) -> Forecast:
        """With `now` workers and half of rollout.max_completion_tokens."""
        level, half = self._level[now], self._settings.max_completion_tokens / 2
        if level.completion_len_max <= half:
            return Forecast(level.step_s, True, f"no completion is longer than {half:g} tokens")
        lost = level.beyond_half
        note = f"{lost * 100:.0f} % of the tokens lie beyond {half:g}"
        if math.isnan(lost):
            mean = level.completion_len_mean
            lost = max(0.0, 1 - half / mean) if mean > 0 else 0.0
            note = (
                "the share of tokens beyond half the maximum is not logged: this is an upper bound"
            )
        mean = level.completion_len_mean * (1 - lost)
        kept = 1 - lost
        if not self._is_shared and not math.isnan(level.completion_len_mean):
            longest = min(half, level.completion_len_max)
            before = self._decode_steps(now, level.completion_len_mean, level.completion_len_max)
            kept = self._decode_steps(now, mean, longest) / before
        rollout_s = level.fixed_s + level.work_s * kept
        prompt = 0.0 if math.isnan(level.prompt_len_mean) else level.prompt_len_mean
        read = (prompt + mean) / (prompt + level.completion_len_mean)
        update_s = level.update_s * (1.0 if math.isnan(read) else read)
        return Forecast(self._together(level, update_s, rollout_s), False, note)

    def _together(self, level: Sides, update_s: float, rollout_s: float) -> float:
        return both_s(update_s, rollout_s, self._settings) + self._rest_s(level)

    def _rest_s(self, level: Sides) -> float:
        """The step time of `level` outside its two sides, so that no change predicts the same step.

        Medians do not add up: with the median of the rests every prediction would be off by the
        same seconds, and both one more and one fewer worker could look faster.
        """
        return level.step_s - both_s(level.update_s, level.rollout_s, self._settings)

    def _work_s(self, now: int, then: int) -> tuple[float, bool, str]:
        """Seconds of the busiest of `then` workers, whether they are measured, and the reason."""
        level = self._level[now]
        tokens = level.tokens if level.tokens > 0 else 1.0
        if len(self._seen.get(then, ())) >= ENOUGH:
            work_s = self._level[then].work_s_per_token * tokens
            return work_s, True, f"measured with {then} workers"
        exponent = self._prior(now, then)
        note = (
            "workers share the cores of one host: the gain is small"
            if self._is_shared
            else "limited by tokens while all slots are in use, then by the longest completion"
        )
        if measured_exponents := self._measured_exponents(now):
            exponent = (
                2 * sum(measured_exponents.values()) / len(measured_exponents) + exponent
            ) / 3
            *few, most = sorted({now, *measured_exponents})
            note = f"from the times with {', '.join(map(str, few))} and {most} workers"
        ratio = (self._share(then) / self._share(now)) ** exponent
        return level.work_s * ratio, False, note

    def _measured_exponents(self, now: int) -> dict[int, float]:
        """Exponents of work over share between `now` and other numbers of workers.

        Values beyond 1.2 or below -0.5 are noise: workers cannot share more than all of the work,
        and even workers that slow each other down share some of it.
        """
        exponents = {}
        mine = self._level[now].work_s_per_token
        for other, level in self._level.items():
            shares = self._share(other) / self._share(now)
            if other == now or len(self._seen[other]) < ENOUGH or shares == 1:
                continue
            if mine > 0 and level.work_s_per_token > 0:
                exponent = math.log(level.work_s_per_token / mine) / math.log(shares)
                exponents[other] = min(1.2, max(-0.5, exponent))
        return exponents

    def _prior(self, now: int, then: int) -> float:
        """Exponent of work over share without measurements."""
        if self._is_shared:
            return SHARED_SCALABILITY
        level = self._level[now]
        shares = self._share(then) / self._share(now)
        if shares == 1:
            return 0.0
        mean, longest = level.completion_len_mean, level.completion_len_max
        if math.isnan(mean) or math.isnan(longest):
            return 1.0
        ratio = self._decode_steps(then, mean, longest) / self._decode_steps(now, mean, longest)
        return math.log(ratio) / math.log(shares)

    def _share(self, workers: int) -> float:
        """Share of a step's groups for the busiest worker; groups are not divided."""
        groups = max(1, self._settings.prompts_per_step)
        return math.ceil(groups / workers) / groups

    def _decode_steps(self, workers: int, mean: float, longest: float) -> float:
        """Decode steps of the busiest of `workers` workers, if each step costs the same.

        With all slots in use the tokens are the limit, plus half of a longest completion at the
        end; with free slots the longest completion is the limit.
        """
        settings = self._settings
        groups = math.ceil(settings.prompts_per_step / workers)
        rows = groups * settings.completions_per_prompt
        if rows <= settings.slots:
            return longest
        return max(longest, rows * mean / settings.slots + longest / 2)

    def _overlap(self) -> float:
        if self._settings.colocated:
            return 0.0
        return SHARED_OVERLAP if self._is_shared else OWN_OVERLAP


def _paired(steps: Sequence[Sides]) -> float:
    """Median of the longer side of each step: with one version of slack a step waits for both."""
    return statistics.median(max(one.rollout_s, one.update_s) for one in steps)
