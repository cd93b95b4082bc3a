"""Alerts on what the policy learns from: rewards, completions and updates."""

import math
import statistics

from diagnosis.judgement.alerts.rule import BAD, WARN, RuleFinding, Scene
from diagnosis.judgement.recent import percent


def zero_variance(scene: Scene) -> RuleFinding | None:
    """More than half of the groups have equal rewards, so they carry no gradient."""
    recent = scene.recent
    if not recent.settings.compares_groups or not recent.settings.learns_from_rewards:
        return None
    share = recent.median("rollout/zero_variance_fraction")
    if not scene.is_above(share, 0.50, 0.45):
        return None
    advice = "draw more completions a prompt, or use prompts that are neither too easy nor too hard"
    text = f"{percent(share)} of the groups have equal rewards and no learning signal"
    mean, best = recent.mean("reward/total/mean"), recent.greatest("reward/total/max")
    worst = min(recent.values("reward/total/min"), default=math.nan)
    if best == worst:
        text += f"; every reward is {best:g}"
        advice = "read samples: are all prompts solved, or does the reward function find no answer?"
    elif mean - worst < 0.05 * (best - worst):
        text += f"; almost every reward is the lowest, {worst:g}"
        advice = (
            "read samples: does the prompt have the form that the model knows "
            "(data.system_prompt, data.question_template), and does the reward function find the "
            "answer? If so, use easier prompts"
        )
    elif best - mean < 0.1 * (best - worst):
        text += f"; almost every reward is the highest, {best:g}"
        advice = "use harder prompts: these are solved"
    if recent.settings.zero_variance == "keep":
        advice += "; algorithm.zero_variance=mask skips these groups, resample replaces them"
    return RuleFinding(BAD if share > 0.9 else WARN, text, advice, "trust")


def truncated(scene: Scene) -> RuleFinding | None:
    """More than 20 % of the completions reach the maximum length."""
    recent = scene.recent
    share = recent.median("rollout/truncated_fraction")
    if not scene.is_above(share, 0.20, 0.15):
        return None
    return RuleFinding(
        WARN,
        f"{percent(share)} of the completions are cut off at "
        f"{recent.settings.max_completion_tokens} tokens",
        "raise rollout.max_completion_tokens, or reward shorter answers; algorithm.truncated "
        "decides how such completions enter the update",
        "learning",
    )


def aborted(scene: Scene) -> RuleFinding | None:
    """More than 5 % of the completions were aborted."""
    share = scene.recent.median("rollout/aborted_fraction")
    if not scene.is_above(share, 0.05, 0.02):
        return None
    return RuleFinding(
        WARN,
        f"{percent(share)} of the completions were aborted before their end",
        "Samples with the finish reason aborted show where they stopped; Fleet shows workers that "
        "were drained or restarted",
        "learning",
    )


def reward_errors(scene: Scene) -> RuleFinding | None:
    """More than 1 % of the completions could not be scored."""
    share = scene.recent.mean("reward_error/fraction")
    if not scene.is_above(share, 0.01, 0.005):
        return None
    return RuleFinding(
        BAD if share > 0.1 else WARN,
        f"{percent(share)} of the completions could not be scored and are left out",
        "filter Samples by error; if they timed out, raise reward.timeout_s or reward.processes",
        "samples",
    )


def disagreement(scene: Scene) -> RuleFinding | None:
    """Strict and lenient parser of a reward function often disagree."""
    recent = scene.recent
    for name in recent.names("reward/", "/disagreement"):
        share = recent.median(name)
        if scene.is_above(share, 0.20, 0.15):
            scorer = name.removeprefix("reward/").removesuffix("/disagreement")
            return RuleFinding(
                WARN,
                f"{scorer}: strict and lenient parser disagree on {percent(share)} of the "
                "completions",
                "filter Samples by disagreement: the reward may depend on the answer's format",
                "samples",
            )
    return None


def entropy(scene: Scene) -> RuleFinding | None:
    """The entropy fell below a tenth of its first value, and the reward did not rise.

    A policy that has learned has low entropy too: a reward that rose by half a standard deviation
    of the first steps explains it.
    """
    recent, first = scene.recent, scene.first
    start, now = first.median("train/entropy"), recent.median("train/entropy")
    if not recent.is_full or not start > 0 or not scene.is_below(now / start, 0.10, 0.15):
        return None
    gain = recent.median("reward/total/mean") - first.median("reward/total/mean")
    if gain > 0.5 * first.median("reward/total/std"):
        return None
    return RuleFinding(
        BAD,
        f"entropy fell to {percent(now / start)} of its first value ({now:.2g} nats a token), and "
        f"the reward did not rise ({gain:+.2g})",
        "the policy hardly explores any more: resume from an earlier checkpoint with a lower "
        "learning rate, algorithm.entropy_coef or a larger algorithm.clip_high",
        "learning",
    )


def reward_fell(scene: Scene) -> RuleFinding | None:
    """The mean reward of ten steps is half a standard deviation below the best of the last hundred.

    The standard deviation is that of one completion.
    """
    values = [
        f.metrics["reward/total/mean"] for f in scene.long if "reward/total/mean" in f.metrics
    ]
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 20:
        return None
    width = 10
    means = [statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1)]
    best, now, std = max(means), means[-1], scene.recent.median("reward/total/std")
    if not std > 0 or not scene.is_above((best - now) / std, 0.5, 0.4):
        return None
    return RuleFinding(
        WARN,
        f"the reward fell from {best:.3g} to {now:.3g} within the last {len(values)} steps",
        "compare Samples from before and after; high KL, clip fractions or gradient norm mean that "
        "the updates are too large",
        "learning",
    )


def grad_norm(scene: Scene) -> RuleFinding | None:
    """One of the last five steps is above ten times the median of the steps before."""
    norms = [f.metrics.get("train/grad_norm", math.nan) for f in scene.long]
    known = [norm for norm in norms if math.isfinite(norm)]
    if len(known) < 15:
        return None
    usual, spike = statistics.median(known[:-5]), max(known[-5:])
    if not usual > 0 or spike <= 10 * usual:
        return None
    return RuleFinding(
        WARN,
        f"the gradient norm jumped to {spike:.3g}; the usual value is {usual:.3g}",
        "learner.optimizer.clip_norm limits the effect; if it happens again, lower the learning "
        "rate and read the samples of that step",
        "learning",
    )


def nonfinite(scene: Scene) -> RuleFinding | None:
    """A metric is NaN or infinite."""
    names = scene.recent.nonfinite()
    if not names:
        return None
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return RuleFinding(
        BAD if any(name.startswith("train/") for name in names) else WARN,
        f"not finite in the last {len(scene.recent.steps)} steps: {shown}",
        "an update that is not finite is skipped, and its groups are kept in the folder rejected/ "
        "of the run; reward/total/mean is NaN if no completion was scored",
        "trust",
    )


_SKIP_ADVICE = {
    True: "loss or gradient was not finite: see the groups in the folder rejected/ of the run",
    False: "no group was left to train on: see the share of zero-variance groups, of reward errors "
    "and of truncated completions",
}
"""By whether the skipped step has a loss."""


def skipped(scene: Scene) -> RuleFinding | None:
    """A step made no update."""
    count = sum(scene.recent.values("train/update_skipped"))
    if not count:
        return None
    with_loss = {
        "train/loss" in facts.metrics
        for facts in scene.recent.steps
        if facts.metrics.get("train/update_skipped")
    }
    return RuleFinding(
        BAD if count > 2 else WARN,
        f"{count:.0f} of the last {len(scene.recent.steps)} steps made no update",
        "; ".join(advice for has_loss, advice in _SKIP_ADVICE.items() if has_loss in with_loss),
        "trust",
    )


def clipped(scene: Scene) -> RuleFinding | None:
    """More than 30 % of the tokens are clipped."""
    low = scene.recent.median("train/clip_fraction_low")
    high = scene.recent.median("train/clip_fraction_high")
    if not scene.is_above(low + high, 0.30, 0.25):
        return None
    return RuleFinding(
        WARN,
        f"{percent(low + high)} of the tokens are clipped ({percent(low)} below, "
        f"{percent(high)} above)",
        "the policy changes too much in one step: lower the learning rate, "
        "learner.updates_per_batch or the staleness",
        "learning",
    )


def logprob_gap(scene: Scene) -> RuleFinding | None:
    """Learner and sampler compute different logprobs of the same tokens."""
    recent = scene.recent
    gap = recent.median("offpolicy/logprob_gap_mean")
    bound = 0.1 if recent.median("offpolicy/staleness_mean") > 0 else 0.02
    if not scene.is_above(gap, bound, 0.8 * bound):
        return None
    return RuleFinding(
        BAD if gap > 5 * bound else WARN,
        f"learner and sampler differ by {gap:.2g} nats a token; below {bound:g} is usual",
        "use the same compute_dtype on both sides, or algorithm.off_policy.token_truncate; a gap "
        "that appears suddenly points to a wrong template, temperature or tensor",
        "trust",
    )
