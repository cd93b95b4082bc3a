"""What of a run's time and learning a person should know now: the rules behind the alerts.

A rule looks at the last ten trained steps and returns a finding or None. Where a number goes up and
down around a threshold, an alert that stands is taken back only below a lower one: `on` and `off`.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from diagnosis.judgement.breakdown import busiest_worker, waiting_share
from diagnosis.judgement.recent import Recent, percent
from diagnosis.records.facts import LEARNER, StepFacts
from services.process.phases import UNEXPLAINED

BAD, WARN, INFO = "bad", "warn", "info"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An alert without its history."""

    severity: str
    text: str
    advice: str
    view: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What a rule may look at."""

    recent: Recent
    first: Recent
    """The first ten steps that trained and did not compile, since the run was opened."""
    baseline: Recent
    """The first ten settled steps with the workers of now."""
    long: Sequence[StepFacts]
    """Up to a hundred trained steps, the last ones of `recent` included."""
    stands: bool = False
    """Whether this alert stood after the step before."""

    def beyond(self, value: float, on: float, off: float) -> bool:
        """Whether a value is high enough to raise the alert, or to let it stand."""
        return value > (off if self.stands else on)

    def below(self, value: float, on: float, off: float) -> bool:
        """The same for a value that should not be low."""
        return value < (off if self.stands else on)


Rule = Callable[[Scene], Finding | None]


def learner_waits(scene: Scene) -> Finding | None:
    recent, settings = scene.recent, scene.recent.settings
    share = recent.median_of(lambda facts: waiting_share(facts, LEARNER))
    if not scene.beyond(share, 0.40, 0.33):
        return None
    advice = f"add a worker ({len(recent.last.workers)} now)"
    if settings.max_staleness == 0:
        advice += ", or raise rollout.max_staleness so that rollouts go on beside the update"
    else:
        advice += f", or raise rollout.max_staleness ({settings.max_staleness} now)"
    if settings.colocated:
        advice = "placement.mode=separate gives the rollouts devices of their own"
    text = f"the learner waits {percent(share)} of the step for rollouts"
    return Finding(WARN, text, advice + "; What if says what it would bring", "what_if")


def workers_wait(scene: Scene) -> Finding | None:
    recent = scene.recent
    if not recent.last.workers or recent.settings.colocated:
        return None
    share = recent.median_of(lambda facts: waiting_share(facts, busiest_worker(facts) or LEARNER))
    # In turns, what one side works the other waits: three quarters are lopsided, a half is not.
    limits = (0.75, 0.65) if recent.settings.max_staleness == 0 else (0.60, 0.50)
    if not scene.beyond(share, *limits):
        return None
    advice = "give the learner more devices or larger micro-batches"
    if len(recent.last.workers) > 1:
        advice = f"fewer workers would do ({len(recent.last.workers)} now), or " + advice
    if recent.settings.max_staleness == 0:
        advice += "; rollout.max_staleness=1 lets them work during the update"
    text = f"even the busiest worker waits {percent(share)} of the step for the learner"
    return Finding(INFO, text, advice, "breakdown")


def compiles(scene: Scene) -> Finding | None:
    recent = scene.recent
    for process in recent.last.processes:
        seconds = [facts.phase_s(process, "compile") for facts in recent.steps]
        count = sum(s > 0.01 * facts.wall_s for s, facts in zip(seconds, recent.steps, strict=True))
        if recent.is_full and scene.beyond(count, 4, 2):
            share = sum(seconds) / sum(facts.wall_s for facts in recent.steps)
            return Finding(
                WARN,
                f"{process} compiled in {count} of the last {len(recent.steps)} steps, "
                f"{percent(share)} of their time",
                "shapes change from step to step: bound them with "
                "rollout.decode.compile_budget and a fixed learner.microbatch_tokens",
                "breakdown",
            )
    return None


def unexplained(scene: Scene) -> Finding | None:
    recent, bound = scene.recent, scene.recent.settings.unexplained_fraction
    shares = {
        process: recent.median_of(lambda f, p=process: f.phase_s(p, UNEXPLAINED) / f.wall_s)
        for process in recent.last.processes
    }
    worst = max(shares, key=lambda process: shares[process], default="")
    if not worst or not scene.beyond(shares[worst], bound, 0.8 * bound):
        return None
    return Finding(
        WARN,
        f"{percent(shares[worst])} of the time of {worst} belongs to no phase; "
        f"log.unexplained_fraction allows {percent(bound)}",
        "look at its lane in the Timeline; a busy machine or a long garbage collection are usual",
        "timeline",
    )


def weights(scene: Scene) -> Finding | None:
    recent = scene.recent
    share = recent.median_of(_weights_share)
    if not scene.beyond(share, 0.15, 0.10):
        return None
    return Finding(
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


def zero_variance(scene: Scene) -> Finding | None:
    recent = scene.recent
    share = recent.median("rollout/zero_variance_fraction")
    if not scene.beyond(share, 0.50, 0.45):
        return None
    advice = "more completions a prompt, or prompts that are neither too easy nor too hard"
    text = f"{percent(share)} of the groups have equal rewards and teach nothing"
    mean, best = recent.mean("reward/total/mean"), recent.greatest("reward/total/max")
    worst = min(recent.values("reward/total/min"), default=math.nan)
    if best == worst:
        text += f"; every reward is {best:g}"
        advice = "read samples: are the prompts solved, or does nothing reach the reward function?"
    elif mean - worst < 0.05 * (best - worst):
        text += f"; almost every reward is the lowest, {worst:g}"
        advice = (
            "read samples: is the prompt what the model knows (data.system_prompt, "
            "data.question_template), and does the reward function find the answer? Else easier "
            "prompts"
        )
    elif best - mean < 0.1 * (best - worst):
        text += f"; almost every reward is the highest, {best:g}"
        advice = "harder prompts: these are solved"
    if recent.settings.zero_variance == "keep":
        advice += "; algorithm.zero_variance=mask spares the learner the work, resample replaces it"
    return Finding(BAD if share > 0.9 else WARN, text, advice, "trust")


def truncated(scene: Scene) -> Finding | None:
    recent = scene.recent
    share = recent.median("rollout/truncated_fraction")
    if not scene.beyond(share, 0.20, 0.15):
        return None
    return Finding(
        WARN,
        f"{percent(share)} of the completions are cut off at "
        f"{recent.settings.max_completion_tokens} tokens",
        "raise rollout.max_completion_tokens, or let a reward function ask for shorter answers; "
        "algorithm.truncated says what they teach",
        "learning",
    )


def aborted(scene: Scene) -> Finding | None:
    share = scene.recent.median("rollout/aborted_fraction")
    if not scene.beyond(share, 0.05, 0.02):
        return None
    return Finding(
        WARN,
        f"{percent(share)} of the completions were aborted before their end",
        "a group that is trained on should have none: look for errors in the workers' logs",
        "learning",
    )


def reward_errors(scene: Scene) -> Finding | None:
    share = scene.recent.mean("reward_error/fraction")
    if not scene.beyond(share, 0.01, 0.005):
        return None
    return Finding(
        BAD if share > 0.1 else WARN,
        f"{percent(share)} of the completions could not be scored and are left out",
        "look at Samples with an error; raise reward.timeout_s or reward.processes if they ran "
        "out of time",
        "samples",
    )


def disagreement(scene: Scene) -> Finding | None:
    recent = scene.recent
    for name in recent.names("reward/", "/disagreement"):
        share = recent.median(name)
        if scene.beyond(share, 0.20, 0.15):
            scorer = name.removeprefix("reward/").removesuffix("/disagreement")
            return Finding(
                WARN,
                f"{scorer}: strict and lenient parser differ in {percent(share)} of the "
                "completions",
                "look at Samples that differ: the reward measures the form of the answer",
                "samples",
            )
    return None


def entropy(scene: Scene) -> Finding | None:
    """Low entropy is what a policy that has learned looks like, unless its reward did not rise.

    A tenth of the first entropy is a policy that hardly explores any more; a reward that rose by
    half a standard deviation of the first steps is what it may have bought with that.
    """
    recent, first = scene.recent, scene.first
    start, now = first.median("train/entropy"), recent.median("train/entropy")
    if not recent.is_full or not start > 0 or not scene.below(now / start, 0.10, 0.15):
        return None
    gain = recent.median("reward/total/mean") - first.median("reward/total/mean")
    if gain > 0.5 * first.median("reward/total/std"):
        return None
    return Finding(
        BAD,
        f"entropy fell to {percent(now / start)} of what it was ({now:.2g} nats a token), and the "
        f"reward did not rise ({gain:+.2g})",
        "the policy hardly explores any more: a lower learning rate, algorithm.entropy_coef or a "
        "larger algorithm.clip_high keep it open; go back to an earlier checkpoint",
        "learning",
    )


def reward_fell(scene: Scene) -> Finding | None:
    """Against the best ten steps of the last hundred, in standard deviations of a completion."""
    values = [
        f.metrics["reward/total/mean"] for f in scene.long if "reward/total/mean" in f.metrics
    ]
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 20:
        return None
    width = 10
    means = [statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1)]
    best, now, std = max(means), means[-1], scene.recent.median("reward/total/std")
    if not std > 0 or not scene.beyond((best - now) / std, 0.5, 0.4):
        return None
    return Finding(
        WARN,
        f"the reward fell from {best:.3g} to {now:.3g} within the last {len(values)} steps",
        "compare Samples of then and now; KL, clip fractions and gradient norm tell whether the "
        "updates are too large",
        "learning",
    )


def grad_norm(scene: Scene) -> Finding | None:
    """One of the last five steps above ten times the median of those before."""
    norms = [f.metrics.get("train/grad_norm", math.nan) for f in scene.long]
    known = [norm for norm in norms if math.isfinite(norm)]
    if len(known) < 15:
        return None
    usual, spike = statistics.median(known[:-5]), max(known[-5:])
    if not usual > 0 or spike <= 10 * usual:
        return None
    return Finding(
        WARN,
        f"the gradient norm jumped to {spike:.3g}, usual are {usual:.3g}",
        "learner.optimizer.clip_norm bounds what it does; if it comes again, lower the learning "
        "rate and look at the samples of that step",
        "learning",
    )


def nonfinite(scene: Scene) -> Finding | None:
    names = scene.recent.nonfinite()
    if not names:
        return None
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return Finding(
        BAD if any(name.startswith("train/") for name in names) else WARN,
        f"not finite in the last {len(scene.recent.steps)} steps: {shown}",
        "an update that is not finite is skipped and its groups are kept in rejected/ of the run's "
        "folder; reward/total/mean is NaN where nothing was scored",
        "trust",
    )


def skipped(scene: Scene) -> Finding | None:
    count = sum(scene.recent.values("train/update_skipped"))
    if not count:
        return None
    return Finding(
        BAD if count > 2 else WARN,
        f"{count:.0f} of the last {len(scene.recent.steps)} steps made no update",
        "nothing was left to train on, or a number was not finite: see the metrics that are not "
        "finite and the share of zero-variance groups",
        "trust",
    )


def clipped(scene: Scene) -> Finding | None:
    low = scene.recent.median("train/clip_fraction_low")
    high = scene.recent.median("train/clip_fraction_high")
    if not scene.beyond(low + high, 0.30, 0.25):
        return None
    return Finding(
        WARN,
        f"{percent(low + high)} of the tokens are clipped ({percent(low)} below, "
        f"{percent(high)} above)",
        "the policy moves too far in one step: a lower learning rate, fewer "
        "learner.updates_per_batch or less staleness",
        "learning",
    )
