"""The KL penalty in the reward: by hand, in a whole update, and what it holds in expectation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.config import AlgorithmConfig
from learner.objective import loss as loss_lib
from learner.objective.batching import rewarded_sequences, select_sequences
from learner.objective.kl_reward import kl_rewards
from models.transformer import forward, packed_attend
from services.process.phase_clock import PhaseClock
from tests.learner import builders
from tests.learner.builders import (
    TINY,
    host_params,
    make_completion,
    make_core,
    make_group,
    random_groups,
)

RULES = builders.RULES
IN_REWARD = {"kl_coef": 0.2, "kl_estimator": "k1", "kl_in": "reward"}


def test_the_penalty_is_the_sum_over_a_completion_worked_out_by_hand():
    completions = [
        make_completion([3, 4], 1.0, logprobs=[-1.0, -2.0]),
        make_completion([5], 0.0, index=1, error="answer: timed out"),
        make_completion([6], 0.0, index=2, logprobs=[-0.5]),
    ]
    groups = [make_group(0, [1, 2], completions)]
    sequences = rewarded_sequences(groups, RULES, vocab_size=24)
    assert sequences["g0"][1] == ()
    # The prompt's first token scores its second one, of which nothing may count.
    reference = [np.float32([9e9, -1.5, -2.25]), np.float32([np.nan, -0.1])]
    found = kl_rewards(sequences, reference, 0.2)
    # (-1 + 1.5) + (-2 + 2.25) = 0.75 nats, and -0.5 + 0.1 = -0.4.
    np.testing.assert_allclose(found.by_group["g0"], [-0.15, 0.0, 0.08], rtol=1e-6)
    assert found.mean == pytest.approx(0.35 / 3)

    selected = select_sequences(groups, RULES, vocab_size=24, added=found.by_group)
    rewards = np.array([0.85, 0.08])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    np.testing.assert_allclose([s.advantages[-1] for s in selected.sequences], expected, rtol=1e-5)


def test_the_penalty_of_an_episode_is_that_of_all_its_records():
    episode = make_completion(
        [3, 7, 8, 4], 1.0, logprobs=[-1.0, -2.0], segments=(1, 2, 1), starts=(1,)
    )
    sequences = rewarded_sequences([make_group(0, [1, 2], [episode])], RULES, vocab_size=24)
    reference = [np.float32([9e9, -1.5]), np.float32([9e9, -2.25])]
    found = kl_rewards(sequences, reference, 0.2)
    np.testing.assert_allclose(found.by_group["g0"], [-0.15], rtol=1e-6)  # 0.5 + 0.25 nats
    assert found.mean == pytest.approx(0.75 / 2)


def test_a_token_that_the_reference_holds_for_impossible_keeps_the_penalty_finite():
    groups = [make_group(0, [1], [make_completion([3], 1.0, logprobs=[-1.0])])]
    sequences = rewarded_sequences(groups, RULES, vocab_size=24)
    found = kl_rewards(sequences, [np.float32([-np.inf])], 1.0)
    assert found.by_group["g0"] == [-loss_lib.MAX_LOG_RATIO]


def test_no_completion_with_a_reward_is_no_divergence():
    failed = make_group(0, [1], [make_completion([3], 0.0, error="answer: timed out")] * 2)
    found = kl_rewards(rewarded_sequences([failed], RULES, vocab_size=24), [], 1.0)
    assert (found.by_group["g0"] == 0).all() and np.isnan(found.mean)


def reference_logprobs(group, completion):
    """Of the first policy, one sequence alone, in float32 on dense logits."""
    tokens = np.concatenate([group.prompt_token_ids, completion.token_ids])
    start, end = len(group.prompt_token_ids) - 1, len(tokens) - 1
    # One length, so that one compilation serves all: what follows the end is not looked at.
    return np.asarray(first_policy(host_params(), np.pad(tokens, (0, 16 - len(tokens)))))[start:end]


@jax.jit
def first_policy(params, tokens):
    N = len(tokens) - 1
    hidden, _ = forward(
        params,
        TINY,
        tokens[None, :-1],
        jnp.arange(N)[None],
        packed_attend(jnp.ones((1, N), jnp.int32), operand_dtype=jnp.float32),
        compute_dtype=jnp.float32,
    )
    logits = hidden[0] @ params["embed_tokens"]["weight"].T / 0.8
    logits = logits[:, : TINY.vocab_size - 2]
    return jax.nn.log_softmax(logits)[jnp.arange(N), tokens[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"advantage": "batch_norm"}, {"advantage": "leave_one_out"}])
def test_an_update_is_the_one_with_the_penalised_rewards(more):
    """Also after the policy has left the reference, which a first update makes it do."""
    groups, penalised, divergence, tokens = random_groups(4), [], 0.0, 0
    for group in groups:
        completions = []
        for completion in group.completions:
            k1 = completion.behavior_logprobs - reference_logprobs(group, completion)
            total = completion.total_reward - 0.2 * float(k1.sum())
            divergence, tokens = divergence + float(k1.sum()), tokens + len(k1)
            completions.append(dataclasses.replace(completion, total_reward=total))
        penalised.append(dataclasses.replace(group, completions=tuple(completions)))
    sgd = {"name": "sgd", "learning_rate": 0.05}
    with_penalty = make_core(algorithm=IN_REWARD | more, optimizer=sgd)
    plain = make_core(algorithm=more, optimizer=sgd)
    for _ in range(2):
        metrics = with_penalty.update(groups, PhaseClock())
        plain.update(penalised, PhaseClock())
        assert metrics["train/kl"] == pytest.approx(divergence / tokens, rel=1e-4)
        actual, expected = with_penalty.named_weights("float32"), plain.named_weights("float32")
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_in_expectation_it_has_the_gradient_of_the_divergence():
    """All completions of two tokens, each weighed by its probability: no sampling noise."""
    rng = np.random.default_rng(0)
    logits = jnp.array(rng.normal(size=(1 + 3, 3)))  # first token, then second after each of three
    reference = jax.nn.log_softmax(jnp.array(rng.normal(size=(4, 3))))
    pairs = [(a, b) for a in range(3) for b in range(3)]

    def tokens_of(logprob, a, b):
        return jnp.array([logprob[0, a], logprob[1 + a, b]])

    def divergence(logits):
        logprob = jax.nn.log_softmax(logits)
        each = [(tokens_of(logprob, *ab), tokens_of(reference, *ab)) for ab in pairs]
        return sum(jnp.exp(p.sum()) * (p - q).sum() for p, q in each)

    sampled = jax.nn.log_softmax(logits)
    groups = [
        make_group(i, [1], [make_completion([a, b], 0.0, logprobs=tokens_of(sampled, a, b))])
        for i, (a, b) in enumerate(pairs)
    ]
    penalty = kl_rewards(
        rewarded_sequences(groups, RULES, vocab_size=24),
        [np.float32(tokens_of(reference, *ab)) for ab in pairs],
        1.0,
    ).by_group

    def loss(logits):
        total = 0.0
        for i, (a, b) in enumerate(pairs):
            old, now = tokens_of(sampled, a, b), tokens_of(jax.nn.log_softmax(logits), a, b)
            terms = loss_lib.token_terms(
                now,
                jnp.zeros(2),
                old,
                jnp.full(2, float(penalty[f"g{i}"][0])),
                jnp.ones(2, bool),
                loss_lib.Objective(0.2, 0.2, 0.0, "k1", 0.0),
            )
            total += jnp.exp(old.sum()) * terms.loss.sum()
        return total

    with jax.enable_x64(True):
        np.testing.assert_allclose(
            jax.grad(loss)(logits), jax.grad(divergence)(logits), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"kl_coef": 0.0}, "kl_in=reward needs a weight: set kl_coef above 0"),
        ({"kl_estimator": "k3"}, "by k1, not k3: set kl_estimator to k1"),
        ({"zero_variance": "mask"}, "zero_variance=mask drops groups .* set zero_variance to keep"),
        ({"advantage": "pass_at_k"}, "counts correct completions, .* kl_in to loss"),
    ],
)
def test_a_penalty_in_the_reward_that_cannot_be_meant_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(IN_REWARD | keys)
