"""Advantages of tokens from a critic: by hand, against the sum as it is written, and in updates."""

import dataclasses

import jax
import numpy as np
import pytest

from learner.config import AlgorithmConfig
from learner.objective import loss as loss_lib
from learner.objective.advantages import AdvantageRule
from learner.objective.batching import select_sequences
from learner.objective.gae import GaeRule, estimate_advantages, gae_advantages
from services.process.phase_clock import PhaseClock
from services.wire.messages import FinishReason
from tests.learner.builders import RULES, make_completion, make_core, make_group, random_groups

GAE = RULES._replace(advantage=AdvantageRule("gae"))
HALVES = GaeRule(gamma=0.5, gae_lambda=0.5, eps=0.0)


def test_advantages_worked_out_by_hand():
    # delta = 0 + 2/2 - 1, 0 + 4/2 - 2, 8 - 4 = 0, 0, 4; each reaches back by a quarter.
    found = gae_advantages(
        np.array([0.0, 0.0, 8.0]), np.array([1.0, 2.0, 4.0]), gamma=0.5, gae_lambda=0.5
    )
    np.testing.assert_array_equal(found, [0.25, 1.0, 4.0])


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0)])
@pytest.mark.parametrize("T", [1, 2, 17])
def test_advantages_are_the_sum_of_equation_16_as_it_is_written(T, gamma, gae_lambda):
    rng = np.random.default_rng(T)
    reward, value = rng.normal(size=T), rng.normal(size=T)
    found = gae_advantages(reward, value, gamma=gamma, gae_lambda=gae_lambda)
    for t in range(T):
        expected = 0.0
        for later in range(t, T):
            following = value[later + 1] if later + 1 < T else 0.0
            delta = reward[later] + gamma * following - value[later]
            expected += (gamma * gae_lambda) ** (later - t) * delta
        assert found[t] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_at_lambda_1_the_advantage_is_the_discounted_reward_less_the_value():
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=9), rng.normal(size=9)
    found = gae_advantages(reward, value, gamma=0.9, gae_lambda=1.0)
    for t in range(9):
        paid = sum(0.9**k * reward[t + k] for k in range(9 - t))
        assert found[t] == pytest.approx(paid - value[t])


def test_a_batch_is_whitened_and_its_targets_are_not():
    """Two completions of a prompt of 2; the second one is alone in its group, and scores 0."""
    groups = [
        make_group(0, [1, 2], [make_completion([3, 4, 5], 8.0)]),
        make_group(1, [1, 2], [make_completion([6], 0.0)]),
    ]
    selection = select_sequences(groups, GAE, vocab_size=24)
    # The prompt's first token scores its second one: what the critic says there is not read.
    values = [np.float32([9e9, 1, 2, 4]), np.float32([np.nan, 1])]
    found, metrics = estimate_advantages(selection, values, HALVES)
    first, second = found.sequences
    raw = np.array([0.25, 1.0, 4.0, -1.0])
    white = (raw - raw.mean()) / raw.std()
    np.testing.assert_allclose(first.advantages, [0, *white[:3]], rtol=1e-6)
    np.testing.assert_allclose(second.advantages, [0, white[3]], rtol=1e-6)
    np.testing.assert_array_equal(first.returns, [0, 1.25, 3, 8])
    np.testing.assert_array_equal(second.returns, [0, 0])
    np.testing.assert_array_equal(first.values, [0, 1, 2, 4])
    assert first.advantages.dtype == first.returns.dtype == first.values.dtype == np.float32
    assert metrics["train/value_mean"] == 2.0
    explained = 1 - raw.var() / np.var([1.25, 3, 8, 0])
    assert metrics["train/explained_variance"] == pytest.approx(explained)
    assert "train/kl" not in metrics


def test_what_an_environment_said_is_no_time_in_which_rewards_are_discounted():
    """Worked out by hand: two tokens of the model, three of an environment, one of the model.

    The last token of the first turn looks ahead to the value at the first one of the next turn,
    which is the critic's at the last token that the environment wrote.
    """
    episode = make_completion([3, 4, 20, 21, 22, 5], 8.0, segments=(2, 3, 1))
    selection = select_sequences([make_group(0, [1, 2], [episode])], GAE, vocab_size=24)
    values = [np.float32([np.nan, 1, 2, np.nan, np.nan, np.nan, 4])]
    found, metrics = estimate_advantages(selection, values, HALVES)
    [only] = found.sequences
    raw = np.array([0.25, 1.0, 4.0])  # as of three tokens in a row
    white = (raw - raw.mean()) / raw.std()
    np.testing.assert_allclose(only.advantages, [0, *white[:2], 0, 0, 0, white[2]], rtol=1e-6)
    np.testing.assert_array_equal(only.returns, [0, 1.25, 3, 0, 0, 0, 8])
    np.testing.assert_array_equal(only.values, [0, 1, 2, 0, 0, 0, 4])
    assert metrics["train/value_mean"] == pytest.approx(7 / 3)


def test_the_penalty_is_paid_token_by_token():
    completions = [make_completion([3, 4], 1.0, logprobs=[-1.0, -2.0])]
    selection = select_sequences([make_group(0, [1], completions)], GAE, vocab_size=24)
    rule = GaeRule(gamma=1.0, gae_lambda=1.0, eps=0.0, kl_coef=0.2)
    zeros = [np.zeros(2, np.float32)]
    found, metrics = estimate_advantages(selection, zeros, rule, [np.float32([-1.5, -2.25])])
    # Rewards -0.2 x 0.5 and 1 - 0.2 x 0.25, which the returns add up from behind.
    np.testing.assert_allclose(found.sequences[0].returns, [0.85, 0.95], rtol=1e-6)
    assert metrics["train/kl"] == pytest.approx(0.375)
    found, _ = estimate_advantages(selection, zeros, rule, [np.float32([-np.inf, -2.25])])
    paid = 0.95 - 0.2 * loss_lib.MAX_LOG_RATIO
    np.testing.assert_allclose(found.sequences[0].returns, [paid, 0.95], rtol=1e-6)


def test_what_lengths_cost_is_in_the_reward_that_is_paid():
    rules = GAE._replace(length=GAE.length._replace(overlong_share=0.5))
    completions = [make_completion(range(1, 13), 1.0), make_completion([1], 1.0, index=1)]
    selection = select_sequences([make_group(0, [1], completions)], rules, vocab_size=24)
    # 12 of 16 tokens: half of what lies beyond 8.
    assert [sequence.reward for sequence in selection.sequences] == [0.5, 1.0]


@pytest.mark.parametrize("truncated, kept", [("keep", [1.0, 0.5]), ("mask", [1.0])])
def test_only_what_has_a_reward_and_may_train_is_estimated(truncated, kept):
    """A completion that was cut ends where it was cut: its reward is paid at its last token."""
    completions = [
        make_completion([3, 4], 1.0),
        make_completion([3, 4], 0.5, index=1, finish=FinishReason.LENGTH),
        make_completion([3], 1.0, index=2, finish=FinishReason.ABORTED),
        make_completion([3], 0.0, index=3, error="answer: timed out"),
    ]
    rules = GAE._replace(truncated=truncated)
    selection = select_sequences([make_group(0, [1], completions)], rules, vocab_size=24)
    zeros = [np.zeros(2, np.float32)] * len(kept)
    found, _ = estimate_advantages(selection, zeros, GaeRule(1.0, 1.0, 1e-6))
    assert [sequence.returns.tolist() for sequence in found.sequences] == [[r, r] for r in kept]


def test_equal_returns_have_no_explained_variance_and_finite_advantages():
    completions = [make_completion([3], 1.0), make_completion([4], 1.0, index=1)]
    selection = select_sequences([make_group(0, [1], completions)], GAE, vocab_size=24)
    zeros = [np.zeros(1, np.float32)] * 2
    found, metrics = estimate_advantages(selection, zeros, GaeRule(1.0, 0.95, 1e-6))
    assert [sequence.advantages.tolist() for sequence in found.sequences] == [[0.0], [0.0]]
    assert metrics == {"train/value_mean": 0.0}


@pytest.mark.parametrize("zero_variance", ["mask", "resample"])
def test_leaving_groups_of_equal_rewards_out_is_refused(zero_variance):
    with pytest.raises(ValueError, match="advantage=gae with zero_variance=.*set zero_variance to"):
        AlgorithmConfig(advantage="gae", zero_variance=zero_variance)


PPO = {"advantage": "gae", "kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
FAST = {"name": "adamw", "learning_rate": 0.02}


@pytest.mark.slow
def test_the_first_update_has_values_of_0_and_later_ones_what_was_learned():
    core = make_core(algorithm=PPO, optimizer=FAST)
    assert "value_head" in core.state.params
    metrics = core.update(random_groups(), PhaseClock())
    assert metrics["train/value_mean"] == 0 and metrics["train/explained_variance"] == 0
    assert metrics["train/value_loss"] > 0 and metrics["train/value_clip_fraction"] == 0
    assert np.isfinite(metrics["train/kl"])
    metrics = core.update(random_groups(), PhaseClock())
    assert metrics["train/value_mean"] != 0
    assert core.outcomes == {f"g{i}": "trained" for i in range(4)}


@pytest.mark.slow
def test_groups_of_one_completion_train():
    groups = [
        dataclasses.replace(group, completions=group.completions[i % 2 : i % 2 + 1])
        for i, group in enumerate(random_groups(6))
    ]
    core = make_core(algorithm=PPO, optimizer=FAST)
    before = core.named_weights("float32")
    metrics = core.update(groups, PhaseClock())
    assert metrics["train/groups"] == 6 and metrics["funnel/nonzero_advantage"] > 0
    assert any((core.named_weights("float32")[name] != before[name]).any() for name in before)


@pytest.mark.slow
def test_several_updates_on_a_batch_keep_its_values_and_targets():
    """The second one's clip is around the values before the first: it holds values that moved."""
    moved = {"name": "sgd", "learning_rate": 1.0, "clip_norm": 1e9}
    core = make_core(algorithm=PPO | {"value_clip": 1e-4}, optimizer=moved, updates_per_batch=2)
    seen = []
    one_update = core._one_update
    core._one_update = lambda batches, *rest: (seen.append(batches), one_update(batches, *rest))[1]
    metrics = core.update(random_groups(), PhaseClock())
    first, second = seen
    for one, other in zip(first, second, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert 0 < metrics["train/value_clip_fraction"] <= 0.5, "none in the first update"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"ratio": "sequence"},
        {"off_policy": {"token_truncate": 1.5, "sequence_low": 0.5, "sequence_high": 2.0}},
        {"policy_loss": "cispo", "aggregation": "seq_mean"},
        {"kl_in": "loss", "kl_estimator": "k3"},
    ],
)
def test_it_goes_with_other_choices_of_the_objective(more):
    core = make_core(algorithm=PPO | more, optimizer=FAST, updates_per_batch=2)
    metrics = core.update(random_groups(), PhaseClock())
    assert metrics["train/update_skipped"] == 0 and np.isfinite(metrics["train/value_loss"])


@pytest.mark.slow
def test_a_batch_that_is_not_finite_leaves_policy_and_critic_as_they_were():
    core = make_core(algorithm=PPO, optimizer=FAST)
    core.update(random_groups(), PhaseClock())
    groups = random_groups(seed=1)
    first = groups[0].completions[0]
    broken = dataclasses.replace(
        first, behavior_logprobs=np.full_like(first.behavior_logprobs, np.nan)
    )
    groups[0] = dataclasses.replace(groups[0], completions=(broken, *groups[0].completions[1:]))
    before = jax.device_get(core.state)
    assert core.update(groups, PhaseClock())["train/update_skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core.state), before)


@pytest.mark.slow
def test_the_critic_learns_which_prompts_pay():
    """A bandit: completions after one prompt pay 1, after another 0, whatever they are."""
    rng = np.random.default_rng(0)

    def batch():
        return [
            make_group(
                number,
                [2 + number % 2],
                [make_completion(rng.integers(4, 20, 3), float(number % 2), logprobs=[-3.0] * 3)],
            )
            for number in range(8)
        ]

    core = make_core(
        algorithm={
            "advantage": "gae",
            "gae_lambda": 1.0,
            "value_coef": 1.0,
            "value_clip": None,
            "value_rate_factor": 1.0,
        },
        optimizer={"name": "adamw", "learning_rate": 0.02},
        total_steps=60,
    )
    found = [core.update(batch(), PhaseClock()) for _ in range(40)]
    assert found[0]["train/explained_variance"] == 0
    assert found[-1]["train/explained_variance"] > 0.95
    assert found[-1]["train/value_mean"] == pytest.approx(0.5, abs=0.1)
    assert found[-1]["train/value_loss"] < 0.05 * found[0]["train/value_loss"]
