"""The ratio of a sequence: its geometric mean, and the gradient that follows from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.objective import loss as loss_lib
from learner.objective.batching import Packing, pack, select_sequences
from learner.objective.sequence_ratio import with_sequence_ratios
from tests.learner import builders
from tests.learner.builders import random_groups

RULES = builders.RULES._replace(aggregation="seq_mean")
OBJECTIVE = loss_lib.Objective(0.1, 0.15, 0.0, "k3", 0.0, sequence_ratio=True)


@pytest.fixture(scope="module")
def selection():
    return select_sequences(random_groups(5), RULES, vocab_size=24)


def logprobs_of(selection, seed=1):
    rng = np.random.default_rng(seed)
    return [np.float32(s.old_logprobs + rng.normal(0, 0.3)) for s in selection.sequences]


@pytest.mark.parametrize("tokens", [16, 40, 64])
def test_packing_puts_each_ratio_at_its_tokens_and_nowhere_else(selection, tokens):
    rated = with_sequence_ratios(selection, logprobs_of(selection))
    found = {}
    for batch in pack(rated.sequences, Packing(tokens, 1)):
        for b, row in enumerate(batch.segments):
            for segment in range(1, row.max() + 1):
                at = row == segment
                [value] = set(batch.sequence_log_ratios[b, at])
                found[tuple(batch.target_ids[b, at])] = value
    expected = [
        (now[s.active].astype(float) - s.old_logprobs[s.active]).mean()
        for s, now in zip(selection.sequences, logprobs_of(selection), strict=True)
    ]
    for sequence, ratio in zip(selection.sequences, expected, strict=True):
        np.testing.assert_allclose(found[tuple(sequence.target_ids)], ratio, rtol=1e-6)
    assert pack(selection.sequences, Packing(tokens, 1))[0].sequence_log_ratios is None


def test_the_gradient_is_that_of_the_loss_of_whole_sequences(selection):
    """GSPO written out: the mean over sequences of the clipped s A, differentiated through s."""
    logprobs = logprobs_of(selection)
    rated = with_sequence_ratios(selection, logprobs)
    assert max(abs(s.log_ratio) for s in rated.sequences) > 0.15, "some are clipped"

    def whole(logprobs):
        losses = []
        for s, now in zip(selection.sequences, logprobs, strict=True):
            ratio = jnp.exp((now - s.old_logprobs)[s.active].mean())
            clipped = jnp.clip(ratio, 0.9, 1.15)
            losses.append(-jnp.minimum(ratio * s.advantages[-1], clipped * s.advantages[-1]))
        return sum(losses) / len(losses)

    def by_token(logprobs):
        total = 0.0
        for s, now in zip(rated.sequences, logprobs, strict=True):
            terms = loss_lib.token_terms(
                now,
                jnp.zeros_like(now),
                jnp.array(s.old_logprobs),
                jnp.full_like(now, s.advantages[-1]),
                jnp.array(s.active),
                OBJECTIVE,
                sequence_log_ratio_BT=jnp.full_like(now, s.log_ratio),
            )
            total += loss_lib.weighted_sum(terms.loss, jnp.array(s.weights))
        return total / selection.denominator

    given = [jnp.array(each) for each in logprobs]
    (value, gradient), (expected, slopes) = (
        jax.jit(jax.value_and_grad(each))(given) for each in (by_token, whole)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(gradient, slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
