"""Episodes of several records: one completion of its group, several sequences that train."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.objective.batching import select_sequences
from learner.objective.gae import GaeRule, estimate_advantages
from learner.objective.off_policy import Correction, correct_selection, weigh_sequence
from models.transformer import forward, head_weight, logits, packed_attend
from services.wire.messages import FinishReason
from tests.learner import builders
from tests.learner.builders import TINY, host_params, make_completion, make_group, random_groups
from tests.learner.update.test_train_step import (
    HEAD,
    OBJECTIVE,
    assert_same_gradient,
    reference_host_params,
    run_accumulate,
)

RULES = builders.RULES
AGGREGATIONS = ("token_mean", "seq_mean", "constant")


def choose(groups, **changes):
    return select_sequences(groups, RULES._replace(**changes), vocab_size=TINY.vocab_size)


def by_hand(prompt, completion):
    """The records, token by token: its id, and its logprob where the model sampled it."""
    drawn, ids = list(completion.behavior_logprobs), list(completion.token_ids)
    lengths = completion.segment_tokens or (len(ids),)
    records = [[(token, None) for token in prompt]]
    for place, length in enumerate(lengths):
        if place in completion.record_starts:
            records.append([])
        for _ in range(length):
            records[-1].append((ids.pop(0), drawn.pop(0) if place % 2 == 0 else None))
    return records


def literal_batch(groups, aggregation):
    """Of every record its tokens, advantage and weight of a token; and the denominator."""
    found, tokens, completions = [], 0, 0
    for group in groups:
        rewards = np.array([completion.total_reward for completion in group.completions])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for completion, advantage in zip(group.completions, advantages, strict=True):
            records = by_hand(group.prompt_token_ids, completion)
            count = sum(drawn is not None for record in records for _, drawn in record)
            weight = 1 / count if aggregation == "seq_mean" else 1.0
            found += [(record, advantage, weight) for record in records]
            tokens, completions = tokens + count, completions + 1
    per_batch = {
        "token_mean": tokens,
        "seq_mean": completions,
        "constant": completions * RULES.max_completion_tokens,
    }
    return found, per_batch[aggregation]


@pytest.fixture(scope="module")
def groups():
    found = random_groups(5, seed=3, episodes=True, records=True)
    starts = [len(c.record_starts) for group in found for c in group.completions]
    assert 0 in starts and 1 in starts and max(starts) > 1
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_records_have_the_advantage_of_their_episode_and_its_weight(groups, aggregation):
    selection = choose(groups, aggregation=aggregation)
    expected, denominator = literal_batch(groups, aggregation)
    assert selection.denominator == denominator
    for sequence, (record, advantage, weight) in zip(selection.sequences, expected, strict=True):
        ids = [token for token, _ in record]
        drawn = [0.0 if logprob is None else logprob for _, logprob in record]
        trains = np.array([logprob is not None for _, logprob in record])
        np.testing.assert_array_equal(sequence.token_ids, ids[:-1])
        np.testing.assert_array_equal(sequence.target_ids, ids[1:])
        np.testing.assert_array_equal(sequence.behavior_logprobs, np.float32(drawn[1:]))
        np.testing.assert_array_equal(sequence.weights, trains[1:] * np.float32(weight))
        expected_N = trains[1:] * np.float32(advantage)
        np.testing.assert_allclose(sequence.advantages, expected_N, rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_is_in_one_record_trains_as_it_always_did(groups, aggregation):
    """Selections of the same tokens are equal where no record begins."""
    plain = [
        dataclasses.replace(
            group,
            completions=tuple(dataclasses.replace(c, record_starts=()) for c in group.completions),
        )
        for group in groups
    ]
    one, several = (choose(each, aggregation=aggregation) for each in (plain, groups))
    assert one.denominator == several.denominator
    assert one.active_tokens == several.active_tokens
    assert len(one.sequences) == sum(len(group.completions) for group in groups)
    for name in ("behavior_logprobs", "weights", "advantages"):
        each = [
            np.concatenate([getattr(s, name)[s.active] for s in chosen.sequences])
            for chosen in (one, several)
        ]
        np.testing.assert_array_equal(*each)


def literal_loss(params, record, advantage):
    """Sum over the tokens of one record that were sampled."""
    ids = np.array([token for token, _ in record], np.int32)[None]
    places = np.array([n for n, (_, drawn) in enumerate(record) if drawn is not None])
    old = np.array([record[n][1] for n in places], np.float32)

    def log_probabilities(its_params):
        T = ids.shape[1]
        attend = packed_attend(jnp.ones((1, T), jnp.int32), operand_dtype=jnp.float32)
        places_T = jnp.arange(T)[None]
        hidden, _ = forward(
            its_params, TINY, ids, places_T, attend, compute_dtype=jnp.dtype("float32")
        )
        scores = logits(hidden, head_weight(its_params))[0, places - 1, : HEAD.valid_vocab]
        return jax.nn.log_softmax(scores / HEAD.temperature)

    log_p, frozen = log_probabilities(params), log_probabilities(reference_host_params())
    at = (np.arange(len(places)), ids[0, places])
    ratio = jnp.exp(log_p[at] - old)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
    d = frozen[at] - log_p[at]
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    kl, bonus = OBJECTIVE.kl_coef * (jnp.exp(d) - d - 1), OBJECTIVE.entropy_coef * entropy
    return (kl - surrogate - bonus).sum()


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_the_gradient_is_that_of_a_literal_computation(groups, aggregation):
    groups = groups[:2]
    selection = choose(groups, aggregation=aggregation)
    records, denominator = literal_batch(groups, aggregation)

    def loss(params):
        return sum(
            weight * literal_loss(params, record, advantage)
            for record, advantage, weight in records
        )

    value, gradient = jax.jit(jax.value_and_grad(loss))(host_params())
    _, accumulator, _ = run_accumulate(selection, data=1, fsdp=1, microbatch_tokens=32)
    np.testing.assert_allclose(accumulator.sums["loss"], value, rtol=1e-5)
    assert selection.denominator == denominator
    assert_same_gradient(accumulator.grads, gradient)


def test_an_episode_cut_off_is_left_out_with_all_its_records():
    cut = make_completion(
        [3, 7, 4], 1.0, finish=FinishReason.LENGTH, segments=(1, 1, 1), starts=(1,)
    )
    group = make_group(0, [1], [cut, make_completion([5], 0.0, index=1)])
    assert len(choose([group]).sequences) == 3
    [left] = choose([group], truncated="mask", aggregation="seq_mean").sequences
    assert left.sample_index == 1


def test_a_record_that_is_masked_leaves_the_others_and_an_episode_counts_once():
    episode = make_completion([3, 7, 4], 1.0, segments=(1, 1, 1), starts=(1,))
    group = make_group(0, [1], [episode, make_completion([5], 0.0, index=1)])
    rules = RULES._replace(aggregation="seq_mean")
    selection = choose([group], aggregation="seq_mean")
    assert [s.sample_index for s in selection.sequences] == [0, 0, 1]
    assert selection.denominator == 2
    correction = Correction(sequence_high=2.0)
    policy = [np.float32([-3.0]), np.float32([-1.0]), np.float32([-3.0])]  # the second is far off
    weights = [
        weigh_sequence(sequence, logprob_N, correction)
        for sequence, logprob_N in zip(selection.sequences, policy, strict=True)
    ]
    kept = correct_selection(selection, weights, correction, rules)
    assert [s.sample_index for s in kept.sequences] == [0, 1] and kept.denominator == 2


def test_a_critic_is_paid_the_reward_of_the_episode_at_the_end_of_each_record():
    episode = make_completion([3, 7, 4, 5], 2.0, segments=(1, 1, 2), starts=(1,))
    selection = choose(
        [make_group(0, [1], [episode])], advantage=RULES.advantage._replace(kind="gae")
    )
    rule = GaeRule(gamma=1.0, gae_lambda=1.0, eps=1e-6)
    values = [np.zeros(len(s.token_ids), np.float32) for s in selection.sequences]
    estimated, _ = estimate_advantages(selection, values, rule)
    for sequence in estimated.sequences:
        assert sequence.returns is not None
        np.testing.assert_array_equal(sequence.returns[sequence.active], 2.0)
