"""Selection and packing: who trains, with what weight, and where each token lies."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.objective.batching import (
    Packing,
    first_fit_decreasing,
    pack,
    row_buckets,
    select_sequences,
    unpack,
)
from learner.objective.length_rewards import LengthRule
from services.wire.messages import FinishReason
from tests.learner import builders
from tests.learner.builders import (
    make_completion,
    make_group,
    random_groups,
)

RULES = builders.RULES._replace(max_completion_tokens=8)


def choose(groups, **changes):
    return select_sequences(groups, RULES._replace(**changes), vocab_size=24)


def test_each_completion_token_is_predicted_by_the_one_before_it():
    group = make_group(
        0,
        [5, 6, 7],
        [
            make_completion([8, 9], 1.0, logprobs=[-0.1, -0.2]),
            make_completion([4], 0.0, index=1, logprobs=[-0.3]),
        ],
    )
    first, second = choose([group]).sequences
    np.testing.assert_array_equal(first.token_ids, [5, 6, 7, 8])
    np.testing.assert_array_equal(first.target_ids, [6, 7, 8, 9])
    np.testing.assert_array_equal(first.weights, [0, 0, 1, 1])
    np.testing.assert_array_equal(first.behavior_logprobs, np.array([0, 0, -0.1, -0.2], np.float32))
    np.testing.assert_allclose([first.advantages[-1], second.advantages[-1]], [1, -1], rtol=1e-5)


def test_masks_come_from_lengths_when_pad_is_eos_T02():
    # id 2 is EOS and would be the pad token too: it is trained where it was sampled, and only
    # there. Lengths 3 and 1 give masks 111 and 100.
    groups = [make_group(0, [2], [make_completion([4, 5, 2], 1.0), make_completion([2], 0.0)])]
    selection = choose(groups)
    [batch] = pack(selection.sequences, Packing(3, 1))[:1]
    assert selection.active_tokens == 4
    masks = {tuple(row > 0) for row in batch.weights}
    assert masks <= {(True, True, True), (True, False, False), (False, False, False)}
    assert sum((b.weights > 0).sum() for b in pack(selection.sequences, Packing(3, 1))) == 4


def test_sampled_ids_reach_the_loss_unchanged_T03():
    ids, logprobs = [0, 1, 3], [-0.5, -0.25, -1.5]
    group = make_group(
        0, [9], [make_completion(ids, 1.0, logprobs=logprobs), make_completion([7], 0.0)]
    )
    [batch] = pack(choose([group]).sequences, Packing(8, 1))
    active = (batch.weights > 0) & (batch.segments == 1)
    np.testing.assert_array_equal(batch.target_ids[active], ids)
    np.testing.assert_array_equal(batch.old_logprobs[active], np.float32(logprobs))


SEGMENTS = st.lists(st.integers(1, 4), min_size=1, max_size=7).map(
    lambda lengths: tuple(lengths[: len(lengths) - (len(lengths) + 1) % 2])
)


@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=4), segments=SEGMENTS)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "constant"])
def test_tokens_of_the_environment_are_context_alone(aggregation, prompt, segments):
    owners = [turn % 2 for turn, tokens in enumerate(segments) for _ in range(tokens)]
    ids = [10 + owner for owner in owners]
    drawn = [-0.1 * (1 + i) for i in range(owners.count(0))]
    kept = segments if len(segments) > 1 else ()
    group = make_group(
        0,
        prompt,
        [
            make_completion(ids, 1.0, logprobs=drawn, segments=kept),
            make_completion([3], 0.0, index=1),
        ],
    )
    selection = choose([group], aggregation=aggregation)
    first, _ = selection.sequences
    # Token by token: what predicts one of the model's trains, and nothing else does.
    left, weight = list(drawn), 1 / len(drawn) if aggregation == "seq_mean" else 1.0
    expected = [(0.0, 0.0)] * (len(prompt) - 1)
    for owner in owners:
        expected.append((weight, left.pop(0)) if owner == 0 else (0.0, 0.0))
    np.testing.assert_array_equal(first.token_ids, [*prompt, *ids][:-1])
    np.testing.assert_array_equal(first.target_ids, [*prompt, *ids][1:])
    np.testing.assert_array_equal(first.weights, np.float32([w for w, _ in expected]))
    np.testing.assert_array_equal(first.behavior_logprobs, np.float32([b for _, b in expected]))
    assert ((first.advantages != 0) == (first.weights > 0)).all()
    assert selection.active_tokens == len(drawn) + 1
    assert set(first.target_ids[first.active]) == {10}


def test_lengths_that_cost_are_those_of_the_model():
    rng = np.random.default_rng(0)
    long = make_completion(rng.integers(0, 9, 8), 1.0, segments=(1, 6, 1))
    group = make_group(0, [5], [long, make_completion([4, 4], 0.0, index=1)])
    rule = LengthRule(overlong_share=0.5)  # of 8 tokens: it costs from the fifth on
    free, costly = choose([group]).sequences, choose([group], length=rule).sequences
    np.testing.assert_array_equal(free[0].advantages, costly[0].advantages)


@pytest.mark.parametrize(
    ("segments", "sampled"),
    [((2, 2), 2), ((4,), 4), ((1, 0, 3), 4), ((1, 1, 3), 4), ((1, 1, 2), 2), ((), 3)],
)
def test_segments_that_do_not_add_up_are_refused(segments, sampled):
    bad = make_completion([1] * 4, 1.0, logprobs=[-1.0] * sampled, segments=segments)
    with pytest.raises(ValueError, match="g0, sample 0: .*(segments|sampled)"):
        choose([make_group(0, [9], [bad, make_completion([2], 0.0, index=1)])])


def test_failed_and_aborted_completions_have_no_say():
    completions = [
        make_completion([1], 1.0),
        make_completion([2], 0.0, index=1, error="answer: timed out"),
        make_completion([3], 0.5, index=2, finish=FinishReason.ABORTED),
        make_completion([4, 4], 0.0, index=3),
    ]
    selection = choose([make_group(0, [9], completions)])
    np.testing.assert_allclose([s.advantages[-1] for s in selection.sequences], [1, -1], rtol=1e-5)
    assert selection.active_tokens == 3 and selection.denominator == 3
    assert selection.outcomes == {"g0": "trained"}


def test_group_of_failures_is_dropped_as_an_error():
    failed = [make_completion([1], 0.0, index=i, error="answer: raised") for i in range(2)]
    selection = choose([make_group(0, [9], failed)])
    assert selection.outcomes == {"g0": "dropped_error"}
    assert not selection.sequences and selection.zero_variance_groups == 0


CUT = FinishReason.LENGTH
ABORTED = FinishReason.ABORTED


@pytest.mark.parametrize(
    "completions",
    [
        # The example of the report: two were cut, one could not be scored.
        [
            make_completion([1, 2], 1.0, finish=CUT),
            make_completion([3, 4], 0.0, index=1, finish=CUT),
            make_completion([5], 0.0, index=2, error="answer: raised"),
        ],
        [make_completion([1], float(i), index=i, finish=CUT) for i in range(2)],
        [make_completion([1], 0.5, index=i, finish=CUT) for i in range(3)],
        [
            make_completion([1], 1.0, finish=CUT),
            make_completion([2], 0.0, index=1, finish=CUT),
            make_completion([3], 0.0, index=2, finish=ABORTED),
        ],
    ],
)
def test_a_group_of_which_nothing_trains_ends_in_a_state_of_its_own_R2(completions):
    normal = make_group(1, [9], [make_completion([1], float(i), index=i) for i in range(2)])
    selection = choose([make_group(0, [9], completions), normal], truncated="mask")
    assert selection.outcomes == {"g0": "dropped_truncated", "g1": "trained"}
    assert {sequence.group_id for sequence in selection.sequences} == {"g1"}
    assert choose([make_group(0, [9], completions)]).outcomes == {"g0": "trained"}


@pytest.mark.parametrize("policy", ["keep", "mask", "resample"])
def test_zero_variance_group(policy):
    equal = make_group(0, [9], [make_completion([1, 2], 0.35, index=i) for i in range(3)])
    varied = make_group(1, [9], [make_completion([1], float(i), index=i) for i in range(2)])
    selection = choose([equal, varied], zero_variance=policy)
    assert selection.zero_variance_groups == 1
    if policy == "keep":
        assert selection.denominator == 8
        assert [s.advantages[-1] for s in selection.sequences[:3]] == [0, 0, 0]
        assert selection.outcomes == {"g0": "trained", "g1": "trained"}
    else:
        assert selection.denominator == 2
        assert selection.outcomes == {"g0": "dropped_zero_variance", "g1": "trained"}


@pytest.mark.parametrize(
    "aggregation, kept, masked",
    [
        ("token_mean", 6, 2),
        ("seq_mean", 2, 1),
        ("constant", 16, 8),
    ],
)
def test_truncated_completion_stays_in_the_baseline_only(aggregation, kept, masked):
    group = make_group(
        0,
        [9],
        [
            make_completion([1, 2], 1.0),
            make_completion([3, 3, 3, 3], 0.0, index=1, finish=FinishReason.LENGTH),
        ],
    )
    everything = choose([group], aggregation=aggregation)
    assert everything.denominator == kept and len(everything.sequences) == 2
    selection = choose([group], aggregation=aggregation, truncated="mask")
    assert selection.denominator == masked
    [left] = selection.sequences
    np.testing.assert_allclose(left.advantages[-1], 1, rtol=1e-5)


def test_sequence_weights_of_seq_mean_sum_to_one():
    for sequence in choose(random_groups(), aggregation="seq_mean").sequences:
        np.testing.assert_allclose(sequence.weights.sum(), 1, rtol=1e-6)


def test_first_fit_decreasing_by_hand():
    # 7 | 5+4 | 3+2+2+1 in bins of 10: 7 takes 3, 5 takes 4 and then 1, the rest share.
    assert first_fit_decreasing([2, 5, 4, 7, 1, 3, 2], 10) == [[3, 5], [1, 2, 4], [0, 6]]


def unpacked(batches):
    """Every segment of every row as (ids, targets, behaviour, advantages, weights)."""
    found = []
    for batch in batches:
        for b in range(len(batch.segments)):
            for segment in range(1, batch.segments[b].max() + 1):
                here = np.flatnonzero(batch.segments[b] == segment)
                assert (np.diff(here) == 1).all()
                np.testing.assert_array_equal(batch.positions[b, here], np.arange(len(here)))
                found.append(
                    (
                        tuple(batch.token_ids[b, here]),
                        tuple(batch.target_ids[b, here]),
                        tuple(batch.old_logprobs[b, here]),
                        tuple(batch.advantages[b, here]),
                        tuple(batch.weights[b, here]),
                    )
                )
    return sorted(found)


@pytest.mark.parametrize("budget, devices", [(14, 1), (64, 1), (100, 2), (512, 8)])
def test_packing_loses_and_invents_nothing(budget, devices):
    sequences = choose(random_groups(6)).sequences
    batches = pack(sequences, Packing(budget, devices))
    expected = sorted(
        (
            tuple(s.token_ids),
            tuple(s.target_ids),
            tuple(s.behavior_logprobs),
            tuple(s.advantages),
            tuple(s.weights),
        )
        for s in sequences
    )
    assert unpacked(batches) == expected
    [shape] = {batch.token_ids.shape for batch in batches}
    assert shape[0] % devices == 0
    assert shape[0] // devices * shape[1] <= budget
    for batch in batches:
        assert not batch.weights[batch.segments == 0].any()


@pytest.mark.parametrize("budget, devices", [(14, 1), (100, 2), (512, 8)])
def test_unpacking_gives_every_token_back_to_its_sequence(budget, devices):
    sequences, packing = choose(random_groups(6)).sequences, Packing(budget, devices)
    batches = pack(sequences, packing)
    for name in ("target_ids", "old_logprobs", "weights"):
        found = unpack([getattr(batch, name) for batch in batches], sequences, packing)
        for values, sequence in zip(found, sequences, strict=True):
            np.testing.assert_array_equal(values, getattr(sequence, name))


def test_importance_multiplies_the_advantage_of_its_token():
    [first, second] = choose(
        [make_group(0, [9], [make_completion([1, 2], 1.0), make_completion([3], 0.0)])]
    ).sequences
    half = dataclasses.replace(first, importance=np.array([0.5, 2.0], np.float32))
    [batch] = pack([half, second], Packing(4, 1))
    advantage = np.float32(first.advantages[-1])
    np.testing.assert_array_equal(
        batch.advantages, [[0.5 * advantage, 2 * advantage, np.float32(second.advantages[-1]), 0]]
    )


def test_few_rows_stay_empty():
    for count in range(1, 40):
        sequences = choose(random_groups(count)).sequences
        batches = pack(sequences, Packing(1024, 1))
        empty = sum(int((batch.segments.max(1) == 0).sum()) for batch in batches)
        rows = sum(len(batch.segments) for batch in batches)
        assert empty <= 0.25 * rows


def test_row_lengths_are_few():
    assert row_buckets(1536) == (64, 128, 256, 512, 1024, 1536)
    assert row_buckets(48) == (48,)
    assert row_buckets(64) == (64,)


def test_nothing_selected_packs_to_nothing():
    assert pack((), Packing(64, 8)) == ()


def test_sequence_beyond_the_budget_is_refused_with_the_numbers():
    sequences = choose(random_groups()).sequences
    longest = max(len(s.token_ids) for s in sequences)
    with pytest.raises(ValueError, match=f"{longest} tokens does not fit a row of 4: raise"):
        pack(sequences, Packing(4, 1))


@pytest.mark.parametrize(
    "prompt, ids, logprobs, message",
    [
        ([1], [1, 2], [-1.0], "each of the 2 token_ids that were sampled, got float32"),
        ([24], [1], [-1.0], r"lie in 1\.\.24"),
        ([1], [-1], [-1.0], r"lie in -1\.\.1"),
        ([], [1], [-1.0], "at least 1 token"),
    ],
)
def test_malformed_group_is_named(prompt, ids, logprobs, message):
    group = make_group(7, prompt, [make_completion(ids, 1.0, logprobs=logprobs)])
    with pytest.raises(ValueError, match=f"group g7.*{message}"):
        choose([group])
