"""Steps for tests of the judgements: few numbers in, one StepFacts out."""

from collections.abc import Iterable, Mapping

from diagnosis.records.facts import RunSettings, StepFacts

METRICS = {
    "time/train/update_s": 1.3,
    "time/train/rollout_generate_s": 0.65,
    "rollout/tokens": 1000.0,
    "rollout/truncated_fraction": 0.0,
    "train/clip_fraction_low": 0.0,
    "train/clip_fraction_high": 0.0,
    "offpolicy/logprob_gap_mean": 1e-6,
    "reward/gsm8k_answer/disagreement": 0.0,
    "train/entropy": 0.3,
    "train/grad_norm": 1.0,
    "reward/total/mean": 0.5,
    "reward/total/std": 0.5,
    "rollout/zero_variance_fraction": 0.2,
    "rollout/completion_len_mean": 20.0,
    "rollout/completion_len_max": 40.0,
    "rollout/prompt_len_mean": 40.0,
    "throughput/train/decode_tokens_per_s": 500.0,
}
"""Of a healthy step."""


def settings(**changes) -> RunSettings:
    """Of a run of 100 steps with two workers on accelerators, unless changed."""
    values = {
        "steps": 100,
        "max_staleness": 0,
        "prompts_per_step": 16,
        "completions_per_prompt": 8,
        "max_completion_tokens": 40,
        "slots": 16,
        "platform": "gpu",
        "colocated": False,
        "workers_min": 1,
        "workers_max": 8,
        "canary_bound": None,
        "unexplained_fraction": 0.05,
        "zero_variance": "keep",
        "learns_from_rewards": True,
        "has_reference": False,
        "advantage": "group_norm",
    }
    return RunSettings(**(values | changes))


def step(
    number: int,
    *,
    wall_s: float = 2.0,
    learner: Mapping[str, float] | None = None,
    workers: Iterable[Mapping[str, float]] | None = None,
    metrics: Mapping[str, float] | None = None,
    without: Iterable[str] = (),
    **facts,
) -> StepFacts:
    """One trained step; phases that do not fill the wall time are idle.

    Args:
        learner: seconds by phase; 1.3 seconds of update unless given.
        workers: of rollout-0, rollout-1 ...; two that decode for 0.6 s unless given.
        metrics: beside METRICS, or instead of theirs.
        without: metrics that the step did not measure.
    """
    rows = {"learner": learner if learner is not None else {"forward_backward": 1.3}}
    given = workers if workers is not None else [{"decode": 0.6}, {"decode": 0.6}]
    rows |= {f"rollout-{i}": row for i, row in enumerate(given)}
    processes = {
        name: {**row, "idle": row.get("idle", max(0.0, wall_s - sum(row.values())))}
        for name, row in rows.items()
    }
    measured = METRICS | dict(metrics or {})
    return StepFacts(
        step=number,
        time=1000.0 + 2.0 * number,
        wall_s=wall_s,
        processes=processes,
        metrics={name: value for name, value in measured.items() if name not in set(without)},
        **facts,
    )
