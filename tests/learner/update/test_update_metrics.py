"""The numbers of an update that say what was generated, and what of it trained."""

import dataclasses

import numpy as np
import pytest

from learner.update.update_metrics import group_metrics
from services.process.phase_clock import PhaseClock
from services.wire.messages import FinishReason
from tests.learner.builders import make_completion, make_core, make_group

pytestmark = pytest.mark.slow

STAGES = ("generated", "scored", "nonzero_advantage", "unclipped", "contributed")


def ids(count, first=0):
    return [(first + 3 * i) % 20 for i in range(count)]


def learner_logprobs(groups):
    """What a fresh learner says of every completion: `[group][completion]`, float32 arrays."""
    core = make_core(algorithm={"off_policy": {"token_truncate": 2.0}})
    found = []
    weigh = core._selection.weigh

    def spy(selection, logprobs):
        weights = weigh(selection, logprobs)
        found.extend(one.old_logprob_T.astype(np.float32) for one in weights)
        return weights

    core._selection.weigh = spy
    core.update(groups, PhaseClock())
    ends = iter(found)
    return [[next(ends) for _ in group.completions] for group in groups]


def with_gaps(groups, gaps):
    """The groups as a policy would have sampled them whose logprobs lie so far below, in nats."""
    learner = learner_logprobs(groups)
    changed = []
    for group, of_group, known in zip(groups, gaps, learner, strict=True):
        completions = tuple(
            dataclasses.replace(
                c, behavior_logprobs=(logprob_T - np.array(gap, np.float32)).astype(np.float32)
            )
            for c, logprob_T, gap in zip(group.completions, known, of_group, strict=True)
        )
        changed.append(dataclasses.replace(group, completions=completions))
    return changed


def batch():
    """Groups, and the gap between learner and sampler at every token.

    With clip 0.2, the policy term of a token is held where its gap is above 0.18 and its advantage
    positive, or its gap below -0.22 and its advantage negative.
    """
    varied = make_group(
        0,
        [1, 2],
        [
            make_completion(ids(5), 1.0, index=0),
            make_completion(ids(7, 1), 0.0, index=1),
            make_completion(ids(6, 2), 1.0, index=2, finish=FinishReason.LENGTH),
            make_completion(ids(4, 3), 0.5, index=3),
        ],
    )
    equal = make_group(1, [3], [make_completion(ids(3, i), 1.0, index=i) for i in range(2)])
    masked = make_group(
        2,
        [4],
        [
            make_completion(ids(8, 4), 1.0, index=0),
            make_completion(ids(2, 5), 0.0, index=1),
        ],
    )
    gaps = [
        [
            [0.0, 0.5, 0.5, 0.0, -0.5],  # advantage above 0: two tokens held
            [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],  # below 0: one
            [0.5] * 6,
            [0.5, 0.0, 0.0, 0.0],
        ],
        [[0.5] * 3, [0.5] * 3],
        [[2.0] * 8, [0.0] * 2],
    ]
    return [varied, equal, masked], gaps


def failed(groups):
    """The same with the last completion of the first group not scored: 4 tokens less."""
    first = groups[0]
    error = dataclasses.replace(
        first.completions[-1],
        rewards={},
        total_reward=float("nan"),
        reward_error="answer: timed out",
    )
    return [dataclasses.replace(first, completions=(*first.completions[:-1], error)), *groups[1:]]


def funnel(metrics):
    return [metrics[f"funnel/{stage}"] for stage in STAGES]


def test_the_funnel_counts_every_kind_of_token_that_does_not_train():
    groups, gaps = batch()
    groups = failed(with_gaps(groups, gaps))
    generated = 5 + 7 + 6 + 4 + 3 + 3 + 8 + 2
    scored = generated - 4
    # Of the first group the one cut by length is masked, of the second the rewards are equal.
    nonzero = 5 + 7 + 8 + 2
    algorithm = {"zero_variance": "mask", "truncated": "mask"}

    metrics = make_core(algorithm=algorithm).update(groups, PhaseClock())
    held = 2 + 1 + 8
    assert funnel(metrics) == [generated, scored, nonzero, nonzero - held, nonzero - held]
    clipped = metrics["train/clip_fraction_low"] + metrics["train/clip_fraction_high"]
    assert held == pytest.approx(clipped * metrics["train/valid_tokens"])

    # The bound leaves the sequence of 8 tokens out before the clip sees it.
    algorithm["off_policy"] = {"sequence_high": 3.0}
    metrics = make_core(algorithm=algorithm).update(groups, PhaseClock())
    held = 2 + 1
    assert funnel(metrics) == [generated, scored, nonzero, nonzero - held, nonzero - held - 8]


def test_a_group_of_equal_rewards_that_is_kept_has_no_advantage_and_contributes_nothing():
    groups, gaps = batch()
    metrics = make_core(algorithm={"zero_variance": "keep"}).update(
        with_gaps(groups, gaps), PhaseClock()
    )
    # Rewards 1, 0, 1, 0.5: all four differ from their mean; the last, below it, has a gap above 0.
    nonzero = 5 + 7 + 6 + 4 + 8 + 2
    held = 2 + 1 + 6 + 0 + 8
    assert metrics["train/valid_tokens"] == nonzero + 6
    assert funnel(metrics) == [38, 38, nonzero, nonzero - held, nonzero - held]


def test_only_the_first_of_several_updates_says_what_the_clip_held():
    groups, gaps = batch()
    groups = with_gaps(groups, gaps)
    one, several = (
        make_core(updates_per_batch=n, optimizer={"learning_rate": 0.1}).update(
            groups, PhaseClock()
        )
        for n in (1, 3)
    )
    assert funnel(one) == funnel(several)
    fractions = [
        m["train/clip_fraction_low"] + m["train/clip_fraction_high"] for m in (one, several)
    ]
    assert fractions[0] != fractions[1], "the later updates see another policy"


def test_nothing_contributes_to_an_update_that_was_skipped():
    groups, gaps = batch()
    groups = with_gaps(groups, gaps)
    first = groups[0].completions[0]
    broken = dataclasses.replace(first, behavior_logprobs=np.full(5, np.nan, np.float32))
    groups[0] = dataclasses.replace(groups[0], completions=(broken, *groups[0].completions[1:]))
    metrics = make_core().update(groups, PhaseClock())
    assert metrics["train/update_skipped"] == 1
    assert funnel(metrics)[:3] == [38, 38, 32] and funnel(metrics)[-1] == 0

    metrics = make_core(algorithm={"zero_variance": "mask"}).update(groups[1:2], PhaseClock())
    assert funnel(metrics) == [6, 6, 0, 0, 0], "nothing was left to train on"


def test_a_batch_that_the_correction_leaves_nothing_of_loses_all_at_the_last_stage():
    groups, gaps = batch()
    groups = with_gaps(groups, [[[2.0] * len(gap) for gap in of_group] for of_group in gaps])
    algorithm = {"zero_variance": "mask", "off_policy": {"sequence_high": 3.0}}
    metrics = make_core(algorithm=algorithm).update(groups, PhaseClock())
    assert funnel(metrics) == [38, 38, 32, 32, 0]


def test_length_metrics_are_the_spread_and_the_share_beyond_half_the_limit():
    lengths = [2, 4, 6, 16]
    completions = [make_completion(ids(n), 0.0, index=i) for i, n in enumerate(lengths)]
    metrics = group_metrics(
        [make_group(0, [1], completions)], policy_version=0, max_completion_tokens=10
    )
    assert metrics["rollout/completion_len_p50"] == 5.0
    assert metrics["rollout/completion_len_p90"] == pytest.approx(np.quantile(lengths, 0.9))
    assert metrics["rollout/tokens_beyond_half"] == (1 + 11) / 28


def test_lengths_are_those_of_the_model_and_turns_are_counted():
    episode = make_completion([1] * 6, 1.0, segments=(1, 2, 1, 1, 1))
    group = make_group(0, [5], [episode, make_completion([2] * 2, 0.0, index=1)])
    metrics = group_metrics([group], policy_version=0, max_completion_tokens=8)
    assert metrics["rollout/completion_len_mean"] == 2.5  # 3 and 2
    assert metrics["rollout/environment_len_mean"] == 1.5  # 3 and 0
    assert metrics["rollout/turns_mean"] == 2.0  # 3 and 1
    of_one_turn = make_group(0, [5], [make_completion([2] * 2, 0.0), make_completion([2], 1.0)])
    names = group_metrics([of_one_turn], policy_version=0, max_completion_tokens=8)
    assert set(metrics) - set(names) == {"rollout/environment_len_mean", "rollout/turns_mean"}


def test_an_episode_of_several_records_is_one_completion():
    episode = make_completion([1] * 6, 1.0, segments=(1, 2, 1, 1, 1), starts=(1, 3))
    group = make_group(0, [5], [episode, make_completion([2] * 2, 0.0, index=1)])
    metrics = group_metrics([group], policy_version=0, max_completion_tokens=8)
    assert metrics["rollout/completions"] == 2 and metrics["rollout/completion_len_mean"] == 2.5
    assert metrics["reward/total/mean"] == 0.5
    assert metrics["rollout/records_mean"] == 2.0  # 3 and 1


def test_disagreement_is_reported_for_every_scorer_with_both_variants():
    def scored(index, **rewards):
        completion = make_completion([1], 0.0, index=index)
        return dataclasses.replace(completion, rewards=rewards)

    completions = [
        scored(0, **{"a": 1.0, "a/strict": 1.0, "a/lenient": 1.0, "b/strict": 0.0}),
        scored(1, **{"a": 0.0, "a/strict": 0.0, "a/lenient": 1.0, "b/strict": 0.0}),
        scored(2, **{"a": 0.0, "a/strict": 0.0, "a/lenient": 0.0, "c/lenient": 1.0}),
        make_completion([1], 0.0, index=3, error="a: timed out"),
    ]
    metrics = group_metrics(
        [make_group(0, [1], completions)], policy_version=0, max_completion_tokens=10
    )
    assert metrics["reward/a/disagreement"] == pytest.approx(1 / 3)
    assert not [
        name for name in metrics if name in ("reward/b/disagreement", "reward/c/disagreement")
    ]
