"""Whether the numbers of a run can be trusted: each check with its bound and a traffic light.

The docstring of each check explains its bound. Every check uses the last ten trained steps.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from diagnosis.judgement.recent import Recent, percent

OK, WARN, BAD, NONE = "ok", "warn", "bad", "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the Trust view."""

    id: str
    title: str
    value: float | None
    unit: str
    bound: float | None
    """Beyond it the traffic light is not green."""
    light: str
    text: str
    series: Sequence[str]
    """Metrics that show its history."""

    def json(self) -> dict[str, Any]:
        """One of `trust` of /api/judgement."""
        return dataclasses.asdict(self) | {"series": list(self.series)}


def trust(recent: Recent) -> list[Check]:
    """Every check, in the order of the view."""
    return [check(recent) for check in CHECKS]


def worst_imbalance(recent: Recent) -> tuple[float, int, str]:
    """The largest |sum of phases - wall| / wall of the steps, its step and its process."""
    return max(
        (
            (abs(facts.accounted_s(process) - facts.wall_s) / facts.wall_s, facts.step, process)
            for facts in recent.steps
            for process in facts.processes
        ),
        default=(0.0, recent.last.step, ""),
    )


def _logprob_gap(recent: Recent) -> Check:
    """Mean |log w| between learner and sampler.

    Equal arithmetic in float32 leaves 1e-6 nats, bfloat16 with different kernels about 0.01. With
    stale groups the policy has changed meanwhile: 0.1 is allowed. Five times the bound is more than
    rounding: weights, template, temperature or cache differ.
    """
    name = "offpolicy/logprob_gap_mean"
    stale = recent.median("offpolicy/staleness_mean") > 0
    bound = 0.1 if stale else 0.02
    value = recent.median(name)
    worst = recent.greatest("offpolicy/logprob_gap_max")
    return _check(
        "logprob_gap",
        "logprob gap, mean",
        value,
        "nats",
        bound,
        _above(value, bound, 5 * bound),
        f"learner and sampler differ by {value:.2g} nats a token, at most {worst:.2g}; "
        f"{bound:g} is {'usual where groups are stale' if stale else 'rounding in bfloat16'}",
        [name, "offpolicy/logprob_gap_max"],
    )


def _raw_weights(recent: Recent) -> Check:
    """Mean raw importance weight.

    Its expectation under the sampling distribution is exactly 1, for any staleness. Over some
    thousand tokens 5 % off is more than chance if weights are near 1; 20 % off means that the
    recorded logprobs are not those of the sampler.
    """
    name = "offpolicy/is_weight_raw_mean"
    value = recent.median(name)
    off = abs(value - 1)
    worst = recent.greatest("offpolicy/is_weight_raw_max")
    return _check(
        "weights_raw",
        "importance weight, raw mean",
        value,
        "",
        1.05,
        _above(off, 0.05, 0.2),
        f"the mean weight is {value:.4g}, the greatest {worst:.3g}; correct logprobs give 1",
        [name, "offpolicy/is_weight_raw_min", "offpolicy/is_weight_raw_max"],
    )


def _truncated_weights(recent: Recent) -> Check:
    """Share of tokens whose weight is cut, or whose sequence is masked.

    Truncation trades bias for variance. At 5 % of the tokens the bias is small compared with that
    of ratio clipping; at 20 % the update mostly optimises another objective.
    """
    names = ["offpolicy/token_share_truncated", "offpolicy/token_share_masked"]
    shares = [recent.median(name) for name in names]
    value = math.nan if all(map(math.isnan, shares)) else sum(s for s in shares if s == s)
    text = "no correction is configured: algorithm.off_policy truncates no weight"
    if not math.isnan(value):
        kept = recent.greatest("offpolicy/is_weight_kept_max")
        text = (
            f"{percent(value)} of the tokens are truncated or masked; kept weights reach {kept:.3g}"
        )
    return _check(
        "weights_truncated",
        "importance weights truncated",
        value,
        "",
        0.05,
        _above(value, 0.05, 0.2),
        text,
        [*names, "offpolicy/is_weight_kept_max"],
    )


def _staleness(recent: Recent) -> Check:
    """Greatest staleness against rollout.max_staleness, which is a hard limit."""
    name, bound = "offpolicy/staleness_max", recent.settings.max_staleness
    value = recent.greatest(name)
    return _check(
        "staleness",
        "staleness, greatest",
        value,
        "versions",
        bound,
        _above(value, bound, bound),
        f"groups were at most {value:g} versions old; rollout.max_staleness allows {bound}",
        [name, "offpolicy/staleness_mean"],
    )


def _zero_variance(recent: Recent) -> Check:
    """Share of groups without a learning signal.

    Beyond one half most of the rollout work is wasted; beyond nine tenths the gradient comes from a
    few prompts. Where completions are not compared with those of their group, or a teacher alone
    says what is better, it says nothing.
    """
    name, settings = "rollout/zero_variance_fraction", recent.settings
    compares = settings.compares_groups and settings.learns_from_rewards
    value = recent.median(name) if compares else math.nan
    text = f"{percent(value)} of the groups have equal rewards and no learning signal"
    if not settings.compares_groups:
        text = "algorithm.advantage does not compare the completions of a group"
    elif not compares:
        text = "the policy learns from its teacher alone (algorithm.distillation)"
    return _check(
        "zero_variance",
        "zero-variance groups",
        value,
        "",
        0.5,
        _above(value, 0.5, 0.9),
        text,
        [name],
    )


def _reward_errors(recent: Recent) -> Check:
    """Share of completions that could not be scored.

    They are left out, which biases the batch: failures are seldom random. 1 % can be a slow
    machine; 10 % is a broken function.
    """
    name = "reward_error/fraction"
    value = recent.mean(name)
    return _check(
        "reward_errors",
        "reward errors",
        value,
        "",
        0.01,
        _above(value, 0.01, 0.1),
        f"{percent(value)} of the completions could not be scored and were left out",
        [name],
    )


def _disagreement(recent: Recent) -> Check:
    """Share of completions on which strict and lenient parser disagree.

    There the reward measures the answer's format. Up to 5 % are unusual completions; from 20 % on
    the accuracy depends on the choice of the parser.
    """
    names = recent.names("reward/", "/disagreement")
    values = {name: recent.median(name) for name in names}
    worst = max(values, key=lambda name: values[name], default="")
    value = values.get(worst, math.nan)
    scorer = worst.removeprefix("reward/").removesuffix("/disagreement")
    return _check(
        "disagreement",
        "strict and lenient disagree",
        value,
        "",
        0.05,
        _above(value, 0.05, 0.2),
        f"{scorer}: the parsers disagree on {percent(value)} of the completions"
        if worst
        else "no reward function has a strict and a lenient variant",
        names,
    )


def _canary(recent: Recent) -> Check:
    """Logprobs of a fixed text at learner and workers, under the same weights.

    The limit is weights.canary_bound if it is set, since workers refuse a version beyond it, else
    0.1 nats: other kernels in bfloat16 stay below, a wrong tensor does not. The bound is half.
    """
    name = "canary/gap_max"
    most = recent.settings.canary_bound or 0.1
    value = recent.greatest(name)
    return _check(
        "canary",
        "canary gap",
        value,
        "nats",
        most / 2,
        _above(value, most / 2, most),
        f"logprobs of a fixed text differ by at most {value:.2g} nats between the processes; "
        f"beyond {most:g} the weights are not the same",
        [name],
    )


def _receipts(recent: Recent) -> Check:
    """Groups whose weights this learner never issued; they are refused.

    A few are usual after a restart of the learner; otherwise a worker holds foreign weights.
    """
    name = "groups/unknown_receipt"
    value, risen = recent.greatest(name), recent.rise(name)
    light = _above(value, 0, math.inf)
    if risen > 0.05 * recent.settings.prompts_per_step * len(recent.steps):
        light = BAD
    return _check(
        "receipts",
        "groups of unknown weights",
        value,
        "groups",
        0,
        light,
        f"{value:.0f} groups since the start have weights that this learner never issued, "
        f"{risen:.0f} of them in the last {len(recent.steps)} steps; all were refused",
        [name],
    )


def _ledger(recent: Recent) -> Check:
    """Sum of a process's phases against the wall time of the step.

    The ledger promises 1 %; reading the clocks one after another explains less. 5 % means that
    time is counted twice.
    """
    value, step, process = worst_imbalance(recent)
    return _check(
        "ledger",
        "phases against wall time",
        value,
        "",
        0.01,
        _above(value, 0.01, 0.05),
        f"the greatest difference is {percent(value)}: {process} in step {step}",
        ["time/train/step_s"],
    )


def _leases(recent: Recent) -> Check:
    """Unfinished groups against the leases that workers hold.

    Every lease belongs to an unfinished group; fewer groups than leases mean that one got lost.
    """
    outstanding, out = recent.last.outstanding, recent.last.metric("leases/out")
    light = NONE if math.isnan(out) else BAD if outstanding < out else OK
    return _check(
        "leases",
        "groups in progress",
        float(outstanding),
        "groups",
        None,
        light,
        f"{outstanding} leased groups are unfinished; workers hold {out:.0f} of them",
        ["leases/out", "leases/expired"],
    )


def _updates(recent: Recent) -> Check:
    """Skipped updates: one can be chance, more than two are a pattern."""
    name = "train/update_skipped"
    value = float(sum(recent.values(name)))
    return _check(
        "updates",
        "updates skipped",
        value,
        "steps",
        0,
        _above(value, 0, 2),
        f"{value:.0f} of the last {len(recent.steps)} steps made no update",
        [name],
    )


def _nonfinite(recent: Recent) -> Check:
    """Metrics that were NaN or infinite: their values are unknown in those steps."""
    names = recent.nonfinite()
    trained = [name for name in names if name.startswith("train/")]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return _check(
        "nonfinite",
        "metrics not finite",
        float(len(names)),
        "metrics",
        0,
        BAD if trained else WARN if names else OK,
        f"not finite in the last {len(recent.steps)} steps: {shown or 'none'}",
        names,
    )


CHECKS: tuple[Callable[[Recent], Check], ...] = (
    _logprob_gap,
    _raw_weights,
    _truncated_weights,
    _staleness,
    _zero_variance,
    _reward_errors,
    _disagreement,
    _canary,
    _receipts,
    _ledger,
    _leases,
    _updates,
    _nonfinite,
)


def _above(value: float, bound: float, bad: float) -> str:
    """The traffic light of a value that should be small."""
    if math.isnan(value):
        return NONE
    return BAD if value > bad else WARN if value > bound else OK


def _check(
    name: str,
    title: str,
    value: float,
    unit: str,
    bound: float | None,
    light: str,
    text: str,
    series: Sequence[str],
) -> Check:
    known = not math.isnan(value)
    if not known and light == NONE and "nan" in text:
        text = "not measured yet"
    return Check(
        id=name,
        title=title,
        value=value if known else None,
        unit=unit,
        bound=bound,
        light=light,
        text=text,
        series=series,
    )
