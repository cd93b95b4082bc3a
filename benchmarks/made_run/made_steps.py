"""One step of a made-up run: spans of each process, and the metrics that follow from them.

The model is that of a run without drift: a fixed amount of decoding is shared by the workers, the
learner updates after them (staleness 0) or beside them, and the reward rises towards a limit.
"""

import dataclasses
from typing import Any

import numpy as np

from services.process.phases import PHASES, UNEXPLAINED

COMPLETIONS = 128
DECODE_S = 1.8
"""Seconds that one worker alone decodes for a batch."""
UPDATE_S = 0.9
CHECKPOINT_EVERY = 20
PULL_BYTES = 10_022_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What kind of run to make up."""

    steps: int = 40
    workers: int = 2
    workers_to: int | None = None
    """Number of workers at the end; it changes in equal parts of the run."""
    max_staleness: int = 0
    seed: int = 0
    part_at: int | None = None
    """From this step on other random numbers than those of the same seed are drawn."""
    flat_from: int | None = None
    """From this step on the reward falls instead of rising."""
    nonfinite: bool = False
    hostile: bool = False
    samples_per_step: int = 4
    tokens: bool = True
    timeline: bool = True

    def workers_at(self, step: int) -> int:
        """How many workers there are in a step."""
        if self.workers_to is None or self.workers_to == self.workers:
            return self.workers
        direction = 1 if self.workers_to > self.workers else -1
        counts = list(range(self.workers, self.workers_to + direction, direction))
        return counts[min(len(counts) - 1, max(0, step - 1) * len(counts) // max(1, self.steps))]

    def names(self, step: int) -> list[str]:
        """Every process of a step."""
        return ["learner", *(f"rollout-{i}" for i in range(self.workers_at(step)))]

    def random(self, step: int) -> np.random.Generator:
        """The numbers of one step depend on nothing but the seed and the step."""
        diverged = self.part_at is not None and step >= self.part_at
        return np.random.default_rng([self.seed, step, int(diverged)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What happened in one step; times in seconds after its start."""

    step: int
    wall_s: float
    spans: dict[str, list[tuple[str, float, float]]]
    """(phase, start, duration) of every process, in order; what is between is unexplained."""
    metrics: dict[str, float]
    accuracy: float

    def seconds(self) -> dict[str, dict[str, float]]:
        """Seconds by phase of every process; those of a process add up to wall_s."""
        rows = {}
        for process, spans in self.spans.items():
            row = dict.fromkeys(PHASES, 0.0)
            for phase, _, duration in spans:
                row[phase] += duration
            row[UNEXPLAINED] = max(0.0, self.wall_s - sum(row.values()))
            rows[process] = row
        return rows


def first_step(plan: RunPlan) -> Step:
    """Step 0, which compiles and evaluates and trains nothing."""
    rng = plan.random(0)
    spans: dict[str, list[tuple[str, float, float]]] = {"learner": [("idle", 0.0, 4.8)]}
    for name in plan.names(0)[1:]:
        compile_s = float(rng.uniform(3.8, 4.4))
        parts = [("weights_swap", 0.08), ("compile", compile_s), ("eval", 0.25)]
        spans[name] = _chain(0.0, parts, until=4.8)
    metrics = _evaluation(rng, 0.275) | _transfers(rng, len(spans) - 1)
    return Step(step=0, wall_s=4.805, spans=spans, metrics=metrics, accuracy=0.275)


def make_step(plan: RunPlan, step: int) -> Step:
    """One step that trains."""
    rng = plan.random(step)
    workers = plan.names(step)[1:]
    chains = [_worker_spans(rng, len(workers), step) for _ in workers]
    generate_s = max(sum(seconds for _, seconds in chain) for chain in chains)
    update = _learner_spans(rng, plan, step)
    update_s = sum(seconds for _, seconds in update)
    evaluates = step == plan.steps
    eval_s = 0.3 if evaluates else 0.0
    lag_s = float(rng.uniform(0.01, 0.03))
    if plan.max_staleness:
        wall_s = max(generate_s, update_s) + eval_s + lag_s
        wait_s = wall_s - update_s - lag_s
        learner = _chain(0.0, [("queue_wait", wait_s), *update], until=wall_s - lag_s)
    else:
        wall_s = generate_s + update_s + eval_s + lag_s
        waits = [("idle", generate_s), ("queue_wait", 0.0005)]
        learner = _chain(0.0, [*waits, *update, ("idle", eval_s)], until=wall_s - lag_s)
    spans = {"learner": learner}
    for name, chain in zip(workers, chains, strict=True):
        parts = [*chain, ("eval", eval_s)] if evaluates else chain
        spans[name] = _chain(0.0, parts, until=wall_s - float(rng.uniform(0.001, 0.004)))
    accuracy = _accuracy(plan, step)
    metrics = _learning(rng, plan, step, accuracy) | _transfers(rng, len(workers))
    metrics |= {
        "time/train/rollout_generate_s": generate_s,
        "time/train/update_s": update_s,
        "throughput/train/valid_tokens_per_s_update": metrics["train/valid_tokens"] / update_s,
        "throughput/train/decode_tokens_per_s": metrics["rollout/tokens"] / generate_s,
    }
    if evaluates:
        metrics |= _evaluation(rng, accuracy)
    if plan.nonfinite:
        metrics |= _nonfinite(plan, step)
    return Step(step=step, wall_s=wall_s, spans=spans, metrics=metrics, accuracy=accuracy)


def _worker_spans(rng: np.random.Generator, workers: int, step: int) -> list[tuple[str, float]]:
    decode_s = DECODE_S / workers * float(rng.normal(1.0, 0.04))
    rounds = 3
    parts = [("weights_wait", float(rng.uniform(0.03, 0.05)))]
    parts.append(("weights_swap", float(rng.uniform(0.012, 0.02))))
    for _ in range(rounds):
        parts += [("prefill", 0.004), ("decode", decode_s / rounds)]
        parts += [("reward", 0.06 / workers / rounds), ("serialise", 0.0004), ("wire", 0.0015)]
    if step == 1:
        parts.insert(2, ("compile", 2.5))
    return parts


def _learner_spans(rng: np.random.Generator, plan: RunPlan, step: int) -> list[tuple[str, float]]:
    update_s = UPDATE_S * float(rng.normal(1.0, 0.03))
    parts = [("forward_backward", update_s), ("optimizer", 0.006), ("serialise", 0.001)]
    parts.append(("publish", float(rng.uniform(0.01, 0.02))))
    if step == 1:
        parts.insert(0, ("compile", 2.6))
    if step % CHECKPOINT_EVERY == 0 or step == plan.steps:
        parts.append(("checkpoint", 0.12))
    return parts


def _chain(
    start: float, parts: list[tuple[str, float]], *, until: float
) -> list[tuple[str, float, float]]:
    """One part after the other, and idle until the end."""
    spans = []
    for phase, seconds in parts:
        if seconds > 0:
            spans.append((phase, start, seconds))
            start += seconds
    if until > start:
        spans.append(("idle", start, until - start))
    return spans


def without_holes(
    spans: list[tuple[str, float, float]], until: float
) -> list[tuple[str, float, float]]:
    """The spans, and unexplained ones between them and up to the end of the step."""
    found, at = [], 0.0
    for phase, start, seconds in [*spans, (UNEXPLAINED, until, 0.0)]:
        if start - at > 1e-9:
            found.append((UNEXPLAINED, at, start - at))
        if seconds > 0:
            found.append((phase, start, seconds))
        at = start + seconds
    return found


def _accuracy(plan: RunPlan, step: int) -> float:
    """Expected reward: from 0.25 towards 0.9, most of it in the first fifth of the run."""
    scale = max(8.0, plan.steps / 5)
    turned = step if plan.flat_from is None else min(step, plan.flat_from)
    fallen = 0.02 * (step - turned)
    return max(0.02, 0.25 + 0.65 * (1 - float(np.exp(-turned / scale))) - fallen)


def _learning(
    rng: np.random.Generator, plan: RunPlan, step: int, accuracy: float
) -> dict[str, float]:
    strict = float(rng.binomial(COMPLETIONS, accuracy)) / COMPLETIONS
    lenient = min(1.0, strict + float(rng.binomial(COMPLETIONS, 0.01)) / COMPLETIONS)
    length = 11 + 9 * accuracy + float(rng.normal(0, 0.5))
    tokens = float(round(COMPLETIONS * length))
    same = float(rng.binomial(16, abs(2 * accuracy - 1) ** 2)) / 16
    gap = 2.7e-7 * float(rng.lognormal(0, 0.3))
    stale = float(min(plan.max_staleness, step - 1))
    scored = tokens - float(rng.binomial(2, 0.1)) * 13
    useful = float(round(scored * (1 - same)))
    clipped = float(round(useful * 0.002 * float(rng.lognormal(0, 0.5))))
    metrics = {
        "rollout/groups": 16.0,
        "rollout/completions": float(COMPLETIONS),
        "rollout/completion_len_mean": length,
        "rollout/completion_len_max": float(rng.integers(32, 41)),
        "rollout/completion_len_p50": float(round(length)),
        "rollout/completion_len_p90": float(round(length * 1.6)),
        "rollout/tokens_beyond_half": max(0.0, float(rng.normal(0.06, 0.01))),
        "rollout/prompt_len_mean": 37.7 + float(rng.normal(0, 0.1)),
        "rollout/truncated_fraction": float(rng.binomial(COMPLETIONS, 0.004)) / COMPLETIONS,
        "rollout/aborted_fraction": 0.0,
        "rollout/resampled_groups": 0.0,
        "rollout/tokens": tokens,
        "rollout/zero_variance_fraction": same,
        "offpolicy/staleness_mean": stale,
        "offpolicy/staleness_max": stale,
        f"offpolicy/staleness_{stale:.0f}": 16.0,
        "reward_error/count": 0.0,
        "reward_error/fraction": 0.0,
        "reward/gsm8k_answer/mean": strict,
        "reward/gsm8k_answer/strict/mean": strict,
        "reward/gsm8k_answer/lenient/mean": lenient,
        "reward/gsm8k_answer/disagreement": lenient - strict,
        "reward/total/mean": strict,
        "reward/total/std": (strict * (1 - strict)) ** 0.5,
        "reward/total/min": 0.0,
        "reward/total/max": 1.0,
        "train/groups": 16.0,
        "train/groups_truncated": 0.0,
        "train/sequences": float(COMPLETIONS),
        "train/valid_tokens": scored,
        "train/input_tokens": tokens + COMPLETIONS * 37.0,
        "train/microbatches": 4.0,
        "train/padding_fraction": 0.21 + float(rng.normal(0, 0.01)),
        "train/loss": -0.1 + float(rng.normal(0, 0.03)),
        "train/entropy": 0.3 * (1.1 - accuracy) + abs(float(rng.normal(0, 0.02))),
        "train/clip_fraction_low": clipped / max(1.0, useful) / 2,
        "train/clip_fraction_high": clipped / max(1.0, useful) / 2,
        "train/grad_norm": 3.0 * float(rng.lognormal(0, 0.3)),
        "train/learning_rate": 3e-5 * min(1.0, step / 5),
        "train/update_skipped": 0.0,
        "funnel/generated": tokens,
        "funnel/scored": scored,
        "funnel/nonzero_advantage": useful,
        "funnel/unclipped": useful - clipped,
        "funnel/contributed": useful - clipped,
    }
    for name in ("is_weight_raw", "sequence_weight_raw"):
        metrics |= {
            f"offpolicy/{name}_mean": 1.0 + gap,
            f"offpolicy/{name}_min": 1.0 - 60 * gap,
            f"offpolicy/{name}_max": 1.0 + 100 * gap,
        }
    for name in ("logprob_gap", "logprob_gap_sequence"):
        metrics |= {f"offpolicy/{name}_mean": gap, f"offpolicy/{name}_max": 60 * gap}
    for name in ("duplicate", "stale", "malformed", "unknown_receipt", "dropped_stale"):
        metrics[f"groups/{name}"] = 0.0
    return metrics


def _transfers(rng: np.random.Generator, workers: int) -> dict[str, float]:
    """Transfers of the version to the workers, and the memory of each process."""
    pull_s = 0.03 * float(rng.lognormal(0, 0.1))
    metrics = {
        "rollout/prompts_set_aside": 0.0,
        "workers/restarts": 0.0,
        "learner/restarts": 0.0,
        "publish/waited_s": 0.001,
        "publish/copy_s": 0.012 * float(rng.lognormal(0, 0.1)),
        "publish/total_s": 0.014,
        "publish/gb_per_s": 0.4 * float(rng.lognormal(0, 0.1)),
        "weights/pulls": float(workers),
        "weights/wire_bytes": PULL_BYTES * workers,
        "weights/version_bytes": PULL_BYTES * workers,
        "weights/delta_fraction": 0.0,
        "weights/pull_s_max": pull_s,
        "weights/gb_per_s": PULL_BYTES / 1e9 / pull_s,
        "weights/relay_depth_max": 1.0,
        "weights/failures": 0.0,
        "canary/gap_max": 0.0,
        "queue/waiting_mean": float(rng.uniform(2, 8)),
        "queue/waiting_max": 16.0,
        "queue/out_mean": float(rng.uniform(4, 12)),
        "queue/out_max": 16.0,
        "mem/learner/host_bytes": 9.1e8,
    }
    for i in range(workers):
        metrics[f"mem/rollout-{i}/host_bytes"] = float(round(6.2e8 * rng.lognormal(0, 0.01)))
        metrics[f"time/rollout-{i}/background_fetch_s"] = pull_s
        metrics[f"time/rollout-{i}/background_push_s"] = 0.04 * float(rng.lognormal(0, 0.1))
    return metrics


def _evaluation(rng: np.random.Generator, accuracy: float) -> dict[str, float]:
    right = float(rng.binomial(200, accuracy)) / 200
    half = 1.96 * (right * (1 - right) / 200) ** 0.5
    metrics = {
        "eval/correct_from": 1.0,
        "eval/pass_at_1": right,
        "eval/reward/total/mean": right,
        "time/eval_s": 0.3,
    }
    for parser in ("strict", "lenient"):
        metrics |= {
            f"eval/accuracy/{parser}": right,
            f"eval/accuracy/{parser}_low": max(0.0, right - half),
            f"eval/accuracy/{parser}_high": min(1.0, right + half),
        }
    return metrics | {
        "eval/reward_errors": 0.0,
        "eval/completions": 200.0,
        "eval/completion_len_mean": 14.0,
        "eval/truncated_fraction": 0.0,
    }


def _nonfinite(plan: RunPlan, step: int) -> dict[str, Any]:
    """What goes wrong in two steps: a NaN halfway, infinity at three quarters."""
    if step == max(1, plan.steps // 2):
        nan = float("nan")
        return {"train/loss": nan, "train/grad_norm": nan, "train/update_skipped": 1.0}
    if step == max(1, plan.steps * 3 // 4):
        infinity = float("inf")
        return {"offpolicy/is_weight_raw_max": infinity, "reward/total/min": -infinity}
    return {}
