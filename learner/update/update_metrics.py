"""Numbers of one update under the names of the metrics log; pure functions of host values."""

from collections.abc import Mapping, Sequence

import numpy as np

from learner.objective.batching import MicroBatch, Selection
from services.wire.messages import FinishReason, Group


def group_metrics(
    groups: Sequence[Group], *, policy_version: int, max_completion_tokens: int
) -> dict[str, float]:
    """Means over the completions of a batch, and how many of its groups have each staleness.

    A completion whose scoring failed counts in `reward_error/*` and in no reward; each scorer's
    mean is over the completions that it scored.

    Args:
        groups: at least one.
        policy_version: the current one; its difference to a group's is that group's staleness.
        max_completion_tokens: that of the rollout; `rollout/tokens_beyond_half` is the share of
            all completion tokens that lies after the first half of it.

    Lengths of completions are of what the model sampled. Where there are episodes of several turns,
    their turns and the tokens of the environment are counted as well, and their records where some
    have several.
    """
    completions = [c for group in groups for c in group.completions]
    lengths = np.array([c.model_tokens for c in completions])
    staleness = np.array([policy_version - group.policy_version for group in groups])
    failed = sum(bool(c.reward_error) for c in completions)
    metrics = {
        "rollout/groups": float(len(groups)),
        "rollout/completions": float(len(completions)),
        "rollout/completion_len_mean": float(lengths.mean()),
        "rollout/completion_len_max": float(lengths.max()),
        "rollout/completion_len_p50": float(np.percentile(lengths, 50)),
        "rollout/completion_len_p90": float(np.percentile(lengths, 90)),
        "rollout/tokens_beyond_half": float(
            np.maximum(lengths - max_completion_tokens / 2, 0).sum() / lengths.sum()
        ),
        "rollout/prompt_len_mean": float(np.mean([len(g.prompt_token_ids) for g in groups])),
        "rollout/truncated_fraction": float(
            np.mean([c.finish_reason is FinishReason.LENGTH for c in completions])
        ),
        "rollout/aborted_fraction": float(
            np.mean([c.finish_reason is FinishReason.ABORTED for c in completions])
        ),
        "offpolicy/staleness_mean": float(staleness.mean()),
        "offpolicy/staleness_max": float(staleness.max()),
        **{
            f"offpolicy/staleness_{n}": float((staleness == n).sum())
            for n in range(max(0, int(staleness.max())) + 1)
        },
        "reward_error/count": float(failed),
        "reward_error/fraction": failed / len(completions),
    }
    if any(c.segment_tokens for c in completions):
        written = [len(c.token_ids) - c.model_tokens for c in completions]
        metrics["rollout/turns_mean"] = float(np.mean([c.turns for c in completions]))
        metrics["rollout/environment_len_mean"] = float(np.mean(written))
    if any(c.record_starts for c in completions):
        metrics["rollout/records_mean"] = float(
            np.mean([1 + len(c.record_starts) for c in completions])
        )
    scored = [c for c in completions if not c.reward_error]
    for name in sorted({name for c in scored for name in c.rewards}):
        values = [c.rewards[name] for c in scored if name in c.rewards]
        metrics[f"reward/{name}/mean"] = float(np.mean(values))
    metrics |= _disagreements([c.disagreements for c in scored])
    if scored:
        totals = np.array([c.total_reward for c in scored])
        metrics["reward/total/mean"] = float(totals.mean())
        metrics["reward/total/std"] = float(totals.std())
        metrics["reward/total/min"] = float(totals.min())
        metrics["reward/total/max"] = float(totals.max())
    return metrics


def _disagreements(completions: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """How often strict and lenient differ, by scorer that has both."""
    return {
        f"reward/{scorer}/disagreement": float(
            np.mean([c[scorer] for c in completions if scorer in c])
        )
        for scorer in sorted({scorer for c in completions for scorer in c})
    }


def selection_metrics(
    selection: Selection, batches: Sequence[MicroBatch], *, groups: int
) -> dict[str, float]:
    """What was chosen to train on, and how full the micro-batches are.

    Args:
        groups: how many the selection was made from.
    """
    slots = sum(batch.token_ids.size for batch in batches)
    inputs = sum(len(s.token_ids) for s in selection.sequences)
    return {
        "rollout/zero_variance_fraction": selection.zero_variance_groups / groups,
        "train/sequences": float(len(selection.sequences)),
        "train/valid_tokens": float(selection.active_tokens),
        "train/input_tokens": float(inputs),
        "train/microbatches": float(len(batches)),
        "train/padding_fraction": 1.0 - inputs / slots if slots else 0.0,
    }


def outcome_metrics(outcomes: Mapping[str, str]) -> dict[str, float]:
    """How many groups of an update trained, and how many were dropped for their length.

    Args:
        outcomes: ledger state by group_id.
    """
    ends = list(outcomes.values())
    return {
        "train/groups": float(ends.count("trained")),
        "train/groups_truncated": float(ends.count("dropped_truncated")),
    }


def token_funnel(
    groups: Sequence[Group],
    selected: Selection,
    trained: Selection,
    *,
    clipped_tokens: float,
    skipped: bool,
    all_train: bool = False,
) -> dict[str, float]:
    """How many completion tokens are left at each stage on their way into the update.

    Each stage takes tokens from the one before: those of completions that could not be scored;
    those that are not in the loss, or whose advantage is 0; those whose policy term the clip holds
    constant; those of sequences that the off-policy correction leaves out. Nothing contributes to
    an update that was skipped.

    Args:
        groups: that the selection was made from.
        selected: before the off-policy correction.
        trained: after it; the same where there is none.
        clipped_tokens: of the trained selection, in the first update of the batch.
        skipped: whether an update of the batch left the policy as it was.
        all_train: whether each token in the loss trains, whatever its advantage, as by a teacher.
    """
    completions = [c for group in groups for c in group.completions]
    with_advantage = _training_tokens(selected, all_train)
    unclipped = with_advantage - clipped_tokens
    masked = with_advantage - _training_tokens(trained, all_train)
    return {
        "funnel/generated": float(sum(c.model_tokens for c in completions)),
        "funnel/scored": float(sum(c.model_tokens for c in completions if not c.reward_error)),
        "funnel/nonzero_advantage": float(with_advantage),
        "funnel/unclipped": float(unclipped),
        "funnel/contributed": 0.0 if skipped else float(unclipped - masked),
    }


def _training_tokens(selection: Selection, all_train: bool) -> int:
    trains = lambda s: s.active & (all_train | (s.advantages != 0))
    return sum(int(trains(s).sum()) for s in selection.sequences)


def update_metrics(
    sums: Mapping[str, float],
    report: Mapping[str, float],
    *,
    denominator: float,
    has_reference: bool,
    has_teacher: bool = False,
) -> dict[str, float]:
    """Of one optimiser update; means are over the tokens in the loss.

    Args:
        sums: of an Accumulator, on the host.
        report: what `apply` returned, on the host.
        denominator: what the loss was divided by; the critic's loss is too.
        has_reference: `train/kl` exists only where there is a reference policy.
        has_teacher: whether the divergence from one is in the loss.
    """
    tokens = float(sums["active_tokens"])
    metrics = {
        "train/loss": float(report["loss"]),
        "train/entropy": float(sums["entropy"]) / tokens,
        "train/clip_fraction_low": float(sums["clipped_low"]) / tokens,
        "train/clip_fraction_high": float(sums["clipped_high"]) / tokens,
        "train/grad_norm": float(report["grad_norm"]),
        "train/learning_rate": float(report["learning_rate"]),
        "train/update_skipped": float(report["skipped"]),
    }
    if has_reference:
        metrics["train/kl"] = float(sums["kl"]) / tokens
    if "value_loss" in sums:
        metrics["train/value_loss"] = float(sums["value_loss"]) / denominator
        metrics["train/value_clip_fraction"] = float(sums["value_clipped"]) / tokens
    if "entropy_coef" in report:
        metrics["train/entropy_coef"] = float(report["entropy_coef"])
    if has_teacher:
        metrics["train/distillation_kl"] = float(sums["distillation_kl"]) / tokens
    return metrics


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Several updates on one batch as one: their mean; the maximum of `skipped`."""
    return {
        name: max(update[name] for update in updates)
        if name.endswith("_skipped")
        else float(np.mean([update[name] for update in updates]))
        for name in updates[0]
    }
