"""Importance weights, truncation and sequence masks against loops over tokens in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.config import AlgorithmConfig, OffPolicyConfig
from learner.objective import loss as loss_lib
from learner.objective.batching import Packing, pack, select_sequences, unpack
from learner.objective.off_policy import (
    Correction,
    correct_selection,
    off_policy_metrics,
    weigh_sequence,
)
from learner.update.update_metrics import group_metrics
from services.process.config_section import validated
from services.process.phase_clock import PhaseClock
from tests.learner.builders import RULES, make_completion, make_core, make_group, random_groups

pytestmark = pytest.mark.slow

OBJECTIVE = loss_lib.Objective(
    clip_low=0.2, clip_high=0.28, kl_coef=0.0, kl_estimator="k3", entropy_coef=0.01
)
BOTH = Correction(token_truncate=1.25, sequence_low=0.92, sequence_high=1.2)


def choose(groups, **changes):
    return select_sequences(groups, RULES._replace(**changes), vocab_size=24)


def one_group(*weights):
    """A group of completions whose tokens' weights are these under a policy that says -1 of all."""
    logprobs = [-1 - np.log(np.array(each)) for each in weights]
    return make_group(
        0,
        [9],
        [
            make_completion([1] * len(each), float(i), index=i, logprobs=each)
            for i, each in enumerate(logprobs)
        ],
    )


def weigh_all(selection, correction, logprob=-1.0):
    """Weighs every sequence under a policy that says the same of every token."""
    return [
        weigh_sequence(s, np.full(len(s.weights), logprob, np.float32), correction)
        for s in selection.sequences
    ]


def moved_logprobs(selection, seed, spread=0.25):
    rng = np.random.default_rng(seed)
    return [
        np.float32(s.behavior_logprobs + rng.normal(rng.normal(0, 0.15), spread, len(s.weights)))
        for s in selection.sequences
    ]


def literal_loss(completions, advantages, old, new, correction, aggregation):
    """Loss, and its derivative by each logprob of `new`: one completion and token after another.

    `old` and `new` hold one number for each token of each completion.
    """
    total, slopes, tokens, sequences = 0.0, [], 0, 0
    for i, completion in enumerate(completions):
        n = len(completion.token_ids)
        log_weights = [float(old[i][t]) - float(completion.behavior_logprobs[t]) for t in range(n)]
        geometric_mean = math.exp(sum(log_weights) / n)
        slopes.append([0.0] * n)
        if correction.sequence_low is not None and geometric_mean < correction.sequence_low:
            continue
        if correction.sequence_high is not None and geometric_mean > correction.sequence_high:
            continue
        tokens, sequences = tokens + n, sequences + 1
        for t in range(n):
            weight, anchor = 1.0, float(completion.behavior_logprobs[t])
            if correction.token_truncate is not None:
                weight = min(math.exp(log_weights[t]), correction.token_truncate)
                anchor = float(old[i][t])
            share = 1 / n if aggregation == "seq_mean" else 1.0
            ratio = math.exp(float(new[i][t]) - anchor)
            bound = 1.28 if advantages[i] > 0 else 0.8
            is_held = ratio > bound if advantages[i] > 0 else ratio < bound
            total -= share * weight * advantages[i] * (bound if is_held else ratio)
            if not is_held:
                slopes[i][t] = -share * weight * advantages[i] * ratio
    divisor = {"token_mean": tokens, "seq_mean": sequences, "constant": sequences * 16}[aggregation]
    return total / divisor, [[slope / divisor for slope in each] for each in slopes]


@jax.jit
@jax.value_and_grad
def loss_and_slopes(logprob_BT, batch, denominator):
    terms = loss_lib.token_terms(
        logprob_BT,
        jnp.zeros_like(logprob_BT),
        batch.old_logprobs,
        batch.advantages,
        batch.weights > 0,
        OBJECTIVE,
    )
    return loss_lib.weighted_sum(terms.loss, batch.weights) / denominator


def batch_loss(selection, new, packing):
    """Loss of packed micro-batches, and its derivative by each logprob of `new`, [N] each."""
    moved = [
        dataclasses.replace(sequence, old_logprobs=logprob_N)
        for sequence, logprob_N in zip(selection.sequences, new, strict=True)
    ]
    total, slopes = 0.0, []
    batches = zip(pack(selection.sequences, packing), pack(moved, packing), strict=True)
    for batch, policy in batches:
        loss, slope_BT = loss_and_slopes(policy.old_logprobs, batch, selection.denominator)
        total += float(loss)
        slopes.append(np.asarray(slope_BT))
    return total, unpack(slopes, selection.sequences, packing)


CORRECTIONS = {
    "off": Correction(),
    "token": Correction(token_truncate=1.25),
    "sequence": Correction(sequence_low=0.92, sequence_high=1.2),
    "both": BOTH,
}


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "constant"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_loss_and_slopes_are_those_of_loops_over_tokens_however_packed(name, aggregation):
    correction, rules = CORRECTIONS[name], RULES._replace(aggregation=aggregation)
    groups = random_groups(6)
    sampled = choose(groups, aggregation=aggregation)
    old, new = moved_logprobs(sampled, 1), moved_logprobs(sampled, 2)
    weights = [
        weigh_sequence(s, o, correction) for s, o in zip(sampled.sequences, old, strict=True)
    ]
    selection = correct_selection(sampled, weights, correction, rules)
    kept = [i for i, its in enumerate(weights) if its.is_kept]
    assert len(kept) < len(weights) if correction.sequence_low else len(kept) == len(weights)

    active = [s.active for s in sampled.sequences]
    loss, slopes = literal_loss(
        [completion for group in groups for completion in group.completions],
        [s.advantages[-1] for s in sampled.sequences],
        [o[its] for o, its in zip(old, active, strict=True)],
        [n[its] for n, its in zip(new, active, strict=True)],
        correction,
        aggregation,
    )
    for packing in (Packing(16, 1), Packing(100, 2), Packing(512, 8)):
        actual, slopes_N = batch_loss(selection, [new[i] for i in kept], packing)
        np.testing.assert_allclose(actual, loss, rtol=1e-5, atol=1e-6)
        for i, slope_N in zip(kept, slopes_N, strict=True):
            np.testing.assert_allclose(slope_N[active[i]], slopes[i], rtol=2e-5, atol=1e-7)
            assert not slope_N[~active[i]].any()
    assert not any(any(slopes[i]) for i in set(range(len(weights))) - set(kept))


def test_weights_by_hand():
    # Weights 4 and 1: geometric mean 2; truncated at 1.5 they are 1.5 and 1.
    selection = choose([one_group([4.0, 1.0], [1.0])])
    first, second = weigh_all(selection, Correction(token_truncate=1.5))
    np.testing.assert_allclose(first.raw_T, [4, 1], rtol=1e-6)
    np.testing.assert_allclose(first.truncated_T, [1.5, 1], rtol=1e-6)
    assert first.geometric_mean == pytest.approx(2, rel=1e-6)
    assert second.geometric_mean == pytest.approx(1, rel=1e-6)
    corrected = correct_selection(selection, [first, second], Correction(token_truncate=1.5), RULES)
    np.testing.assert_allclose(corrected.sequences[0].importance, [1.5, 1], rtol=1e-6)
    np.testing.assert_array_equal(corrected.sequences[0].old_logprobs, [-1, -1])
    np.testing.assert_allclose(
        corrected.sequences[0].behavior_logprobs, [-1 - np.log(4), -1], rtol=1e-6
    )


def test_a_masked_sequence_counts_in_no_denominator():
    # Two sequences of 3 and 1 tokens; the longer one is masked. Counting its tokens still would
    # divide by 4, 2 and 32.
    selection = choose([one_group([3.0, 3.0, 3.0], [1.0])])
    correction = Correction(sequence_high=2.0)
    for aggregation, before, after in (
        ("token_mean", 4, 1),
        ("seq_mean", 2, 1),
        ("constant", 32, 16),
    ):
        rules = RULES._replace(aggregation=aggregation)
        sampled = choose([one_group([3.0, 3.0, 3.0], [1.0])], aggregation=aggregation)
        assert sampled.denominator == before
        corrected = correct_selection(sampled, weigh_all(sampled, correction), correction, rules)
        assert corrected.denominator == after and corrected.active_tokens == 1
    # The mask comes after the baseline: the one that is left keeps its advantage.
    assert corrected.sequences[0].advantages[-1] == selection.sequences[1].advantages[-1]
    assert corrected.outcomes == {"g0": "trained"}


def test_a_sequence_at_a_bound_is_kept_and_one_beyond_it_is_not():
    selection = choose([one_group([1.3, 1.1], [0.8])])
    above, below = (w.geometric_mean for w in weigh_all(selection, Correction()))
    kept = lambda **bounds: [w.is_kept for w in weigh_all(selection, Correction(**bounds))]
    assert kept(sequence_high=above) == [True, True]
    assert kept(sequence_high=np.nextafter(above, 0)) == [False, True]
    assert kept(sequence_low=below) == [True, True]
    assert kept(sequence_low=np.nextafter(below, 1)) == [True, False]
    # Untouched, the weight is exactly 1 and so is a bound of 1.
    same = choose([make_group(0, [9], [make_completion([1], float(i), index=i) for i in (0, 1)])])
    assert all(w.is_kept for w in weigh_all(same, Correction(None, 1.0, 1.0), logprob=-3.0))


@pytest.mark.parametrize(
    "behavior, old, weight",
    [(-301.0, -1.0, math.exp(20)), (-1.0, -301.0, math.exp(-20)), (-np.inf, -1.0, math.exp(20))],
)
def test_extreme_weights_are_clamped_before_exp(behavior, old, weight):
    group = make_group(0, [9], [make_completion([1, 2], 1.0, logprobs=[behavior, -1.0])])
    [sequence] = choose([group]).sequences
    its = weigh_sequence(
        sequence, np.array([old, -1.0], np.float32), Correction(token_truncate=1e6)
    )
    np.testing.assert_allclose(its.raw_T, [weight, 1], rtol=1e-6)
    np.testing.assert_allclose(its.truncated_T, [min(weight, 1e6), 1], rtol=1e-6)
    # The mean is taken before the clamp: exp(+-150) lies beyond any bound.
    np.testing.assert_allclose(its.geometric_mean, weight, rtol=1e-6)


def test_what_a_prompt_token_holds_is_never_read():
    [sequence] = choose([make_group(0, [9, 9], [make_completion([1], 1.0)])]).sequences
    its = weigh_sequence(sequence, np.array([np.nan, -2.0], np.float32), BOTH)
    np.testing.assert_allclose(its.raw_T, [np.exp(1)], rtol=1e-6)


def test_metrics_before_and_after_by_hand():
    # Geometric means 2, 1 and 4; the third is masked, and one weight of the first truncated.
    selection = choose([one_group([4.0, 1.0], [1.0], [4.0])])
    correction = Correction(token_truncate=2.0, sequence_high=3.0)
    metrics = off_policy_metrics(weigh_all(selection, correction), correction)
    two, root = math.log(2), math.sqrt(2)
    expected = {
        "is_weight_raw_mean": 2.5,
        "is_weight_raw_min": 1,
        "is_weight_raw_max": 4,
        "sequence_weight_raw_mean": 7 / 3,
        "sequence_weight_raw_min": 1,
        "sequence_weight_raw_max": 4,
        "logprob_gap_mean": two,
        "logprob_gap_max": 2 * two,
        "logprob_gap_sequence_mean": two,
        "logprob_gap_sequence_max": 2 * two,
        "token_share_truncated": 1 / 2,
        "sequence_share_truncated": 2 / 3,
        "token_share_masked": 1 / 4,
        "sequence_share_masked": 1 / 3,
        "is_weight_kept_mean": 4 / 3,
        "is_weight_kept_min": 1,
        "is_weight_kept_max": 2,
        "sequence_weight_kept_mean": (root + 1) / 2,
        "sequence_weight_kept_min": 1,
        "sequence_weight_kept_max": root,
        "logprob_gap_kept_mean": two / 3,
        "logprob_gap_kept_max": two,
        "logprob_gap_kept_sequence_mean": two / 4,
        "logprob_gap_kept_sequence_max": two / 2,
    }
    assert metrics == {
        f"offpolicy/{name}": pytest.approx(value, rel=1e-6, abs=1e-6)
        for name, value in expected.items()
    }
    off = off_policy_metrics(weigh_all(selection, Correction()), Correction())
    assert off == {name: value for name, value in metrics.items() if name in off}
    assert not any("kept" in name or "share" in name for name in off)


def test_bounds_that_cannot_work_are_refused():
    assert not Correction(**OffPolicyConfig().model_dump()).is_on
    assert validated(AlgorithmConfig, {}).off_policy == OffPolicyConfig()
    for bounds, key in (
        ({"token_truncate": 0.5}, "token_truncate"),
        ({"sequence_low": 1.5}, "sequence_low"),
        ({"sequence_low": 0.0}, "sequence_low"),
        ({"sequence_high": 0.9}, "sequence_high"),
    ):
        with pytest.raises(ValueError, match=f"off_policy.{key}"):
            validated(AlgorithmConfig, {"off_policy": bounds})


def test_a_recorded_run_that_knew_no_correction_has_none():
    plain = AlgorithmConfig(kl_coef=0.1).model_dump(mode="json")
    del plain["off_policy"]
    assert validated(AlgorithmConfig, plain) == AlgorithmConfig(kl_coef=0.1)


def test_groups_are_counted_by_staleness():
    completions = [make_completion([1], 1.0)]
    groups = [make_group(i, [9], completions, policy_version=v) for i, v in enumerate((5, 3, 5))]
    metrics = group_metrics(groups, policy_version=5, max_completion_tokens=16)
    counts = {n: v for n, v in metrics.items() if n.startswith("offpolicy/staleness_")}
    assert counts == {
        "offpolicy/staleness_mean": pytest.approx(2 / 3),
        "offpolicy/staleness_max": 2,
        "offpolicy/staleness_0": 2,
        "offpolicy/staleness_1": 0,
        "offpolicy/staleness_2": 1,
    }


def learner(off_policy, **options):
    # Without momentum or division by it, a step shows the gradient.
    optimizer = {"name": "sgd", "learning_rate": 0.5, "beta1": 0.0, "clip_norm": 1e6}
    return make_core(algorithm={"off_policy": off_policy}, optimizer=optimizer, **options)


def test_learner_corrects_alike_on_another_mesh_with_another_head():
    bounds = {"token_truncate": 1.3, "sequence_low": 0.85, "sequence_high": 1.3}
    found = []
    for options in (
        {"lm_head": "fast"},
        {"lm_head": "logits", "data": 2, "fsdp": 2, "microbatch_tokens": 16},
    ):
        core = learner(bounds, **options)
        metrics = core.update(random_groups(), PhaseClock())
        found.append((metrics, core.named_weights("float32"), core.outcomes))
    (metrics, weights, outcomes), others = found
    assert 0 < metrics["offpolicy/sequence_share_masked"] < 1
    assert 0 < metrics["offpolicy/token_share_truncated"] < 1
    assert metrics["train/sequences"] == 16 * (1 - metrics["offpolicy/sequence_share_masked"])
    assert metrics["train/clip_fraction_high"] == 0, "the ratio is 1 before the first update"
    for name in metrics:
        of_packing = name in ("train/microbatches", "train/padding_fraction")
        if name.startswith(("offpolicy/", "train/")) and not of_packing:
            np.testing.assert_allclose(others[0][name], metrics[name], rtol=2e-5, atol=1e-6)
    for name, array in weights.items():
        np.testing.assert_allclose(others[1][name], array, rtol=2e-5, atol=1e-6)
    assert others[2] == outcomes


def test_bounds_that_nothing_reaches_change_no_bit():
    off, on = learner({}), learner({"sequence_low": 1e-6, "sequence_high": 1e6})
    for seed in range(2):
        before, after = (core.update(random_groups(seed=seed), PhaseClock()) for core in (off, on))
        for name in before:
            if name.startswith(("offpolicy/", "train/")):
                assert before[name] == after[name], name
    for name, array in off.named_weights("float32").items():
        np.testing.assert_array_equal(on.named_weights("float32")[name], array)


def test_truncation_applies_to_all_updates_of_a_batch_and_full_rejection_is_reported():
    core = learner({"token_truncate": 1.3, "sequence_high": 1.5}, updates_per_batch=2)
    metrics = core.update(random_groups(), PhaseClock())
    assert core.state.update_count == 2
    assert metrics["offpolicy/is_weight_kept_max"] == pytest.approx(1.3)
    assert metrics["offpolicy/is_weight_raw_max"] > 1.3

    # Twice as likely now as when they were drawn, one group whole and one in part.
    near = make_group(7, [1], [make_completion([3, 4], float(i), index=i) for i in range(2)])
    far = lambda *completions: [
        dataclasses.replace(c, behavior_logprobs=c.behavior_logprobs - 3) for c in completions
    ]
    group = dataclasses.replace(near, group_id="g8", completions=tuple(far(*near.completions)))
    mixed = dataclasses.replace(
        near, group_id="g9", completions=(near.completions[0], *far(near.completions[1]))
    )
    metrics = core.update([near, group, mixed], PhaseClock())
    assert core.outcomes == {"g7": "trained", "g8": "dropped_stale", "g9": "trained"}
    assert metrics["offpolicy/sequence_share_masked"] == 1 / 2
    assert metrics["train/valid_tokens"] == 6

    before, version = jax.device_get(core.state), core.policy_version
    metrics = core.update([group], PhaseClock())
    assert metrics["train/update_skipped"] == 1 and "train/loss" not in metrics
    assert metrics["offpolicy/sequence_share_masked"] == 1
    assert metrics["offpolicy/token_share_masked"] == 1
    assert not any("kept" in name for name in metrics)
    assert core.outcomes == {"g8": "dropped_stale"} and core.rejected == ()
    assert core.policy_version == version + 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core.state), before)

    broken = dataclasses.replace(
        near.completions[0], behavior_logprobs=np.array([np.nan, -1], np.float32)
    )
    groups = [dataclasses.replace(near, completions=(broken, near.completions[1]))]
    metrics = core.update(groups, PhaseClock())
    assert metrics["train/update_skipped"] == 1
    assert core.rejected == tuple(groups) and core.outcomes == {"g7": "dropped_error"}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core.state), before)
