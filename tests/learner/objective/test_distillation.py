"""What a teacher makes of advantages: by hand, and in expectation, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear_distillation import reference
from learner.config import AlgorithmConfig
from learner.objective import loss as loss_lib
from learner.objective.batching import select_sequences
from learner.objective.distillation import add_teacher, weigh_advantages
from tests.learner.builders import RULES, make_completion, make_group


def selected(*completions):
    return select_sequences([make_group(0, [1, 2], completions)], RULES, vocab_size=24)


def test_each_token_gets_the_log_ratio_of_teacher_and_sampler_worked_out_by_hand():
    selection = selected(
        make_completion([3, 4], 1.0, logprobs=[-1.0, -2.0]),
        make_completion([5], 0.0, index=1, logprobs=[-0.5]),
    )
    # The prompt's first token scores its second one, of which nothing may count.
    teacher = [np.float32([np.nan, -1.5, -1.75]), np.float32([9e9, -0.75])]
    found, mean = add_teacher(weigh_advantages(selection, 0.0), teacher, 2.0)
    np.testing.assert_allclose(found.sequences[0].advantages, [0.0, -1.0, 0.5])
    np.testing.assert_allclose(found.sequences[1].advantages, [0.0, -0.5])
    assert mean == pytest.approx((0.5 - 0.25 + 0.25) / 3)

    both, _ = add_teacher(weigh_advantages(selection, 0.5), teacher, 2.0)
    np.testing.assert_allclose(both.sequences[0].advantages, [0.0, -0.5, 1.0], atol=1e-5)
    np.testing.assert_allclose(both.sequences[1].advantages, [0.0, -1.0], atol=1e-5)


def test_a_token_that_the_teacher_holds_for_impossible_keeps_its_advantage_finite():
    selection = selected(make_completion([3], 1.0, logprobs=[-1.0]))
    found, mean = add_teacher(selection, [np.float32([0.0, -np.inf])], 1.0)
    assert found.sequences[0].advantages[1] == -loss_lib.MAX_LOG_RATIO
    assert mean == loss_lib.MAX_LOG_RATIO


def test_a_batch_without_a_sequence_has_no_divergence():
    selection = selected(make_completion([3], 0.0, error="answer: timed out"))
    found, mean = add_teacher(selection, [], 1.0)
    assert found.sequences == () and np.isnan(mean)


def test_the_sampled_form_has_the_gradient_of_the_full_one_in_expectation():
    """Every token of a small vocabulary, weighed by its probability: no sampling noise."""
    V, coef = 7, 0.3
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        logits, teacher = (jnp.array(rng.normal(size=(1, V))) for _ in range(2))
        log_p, log_q = (jax.nn.log_softmax(z)[0] for z in (logits, teacher))
        selection = selected(*(make_completion([v], 1.0, logprobs=[log_p[v]]) for v in range(V)))
        of_teacher = [np.array([0.0, log_q[v]]) for v in range(V)]
        taught, mean = add_teacher(weigh_advantages(selection, 0.0), of_teacher, coef)
        advantage = jnp.array([s.advantages[-1] for s in taught.sequences], jnp.float64)

        def sampled(logits):
            """Each token's loss, weighed by how often it is sampled."""
            terms = loss_lib.token_terms(
                jax.nn.log_softmax(logits)[0],
                jnp.zeros(V),
                log_p,
                advantage,
                jnp.ones(V, bool),
                loss_lib.Objective(0.2, 0.2, 0.0, "k1", 0.0),
            )
            return (jnp.exp(log_p) * terms.loss).sum()

        full = lambda logits: coef * reference.divergence(logits, teacher).sum()
        # The advantages are float32.
        close = dict(rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(jax.grad(sampled)(logits), jax.grad(full)(logits), **close)
        assert np.abs(jax.grad(full)(logits)).max() > 0.01
        weights = np.exp(log_p)
        each = np.asarray(log_p - log_q)
        np.testing.assert_allclose(coef * (weights * each).sum(), full(logits), rtol=1e-9)
        np.testing.assert_allclose(mean, each.mean(), rtol=1e-5)


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"zero_variance": "resample"},
            "zero_variance=resample drops .* zero_variance to keep",
        ),
        ({"zero_variance": "mask"}, "of whose tokens distillation.teacher has something to say"),
        (
            {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"},
            "advantage_coef=0 trains on none: set advantage_coef above 0, or kl_in to loss",
        ),
        (
            {"advantage": "gae"},
            "advantage=gae trains a critic on rewards, but .* set advantage_coef above 0, or take",
        ),
        ({"distillation": {"teacher": ""}}, "at least 1 character"),
    ],
)
def test_what_takes_the_teachers_signal_away_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate({"distillation": {"teacher": "some/model"}} | keys)
