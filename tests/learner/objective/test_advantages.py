"""Advantages against the public cases, and the laws they obey."""

import itertools
import typing

import numpy as np
import pytest

from learner.config import AlgorithmConfig
from learner.objective.advantages import (
    KINDS,
    AdvantageRule,
    GroupRewards,
    batch_advantages,
    has_variance,
)


def of_group(rewards, kind="group_norm", **rule):
    """Advantages of one group alone."""
    [found] = batch_advantages([GroupRewards(np.array(rewards))], AdvantageRule(kind, **rule))
    assert found.dtype == np.float32
    return found


def test_equal_groups_give_exact_zero_and_others_stay_bounded_L07a(cases):
    case = cases("loss")["L07a"]
    for kind, eps, key in [
        ("group_norm", 1e-6, "ddof0_eps1e-06"),
        ("group_norm", 1e-4, "ddof0_eps0.0001"),
        ("group_centre", 1e-6, "centre_only"),
    ]:
        for rewards, expected in zip(
            case["input"]["reward_groups"], case["expected"][key], strict=True
        ):
            actual = of_group(rewards, kind, eps=eps)
            if not any(expected):
                np.testing.assert_array_equal(actual, np.zeros(len(expected)))
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_float32_rewards_leave_no_residue_L07b(cases):
    case = cases("loss")["L07b"]
    for dtype in (np.float32, np.float64):
        rewards = np.array(case["input"]["rewards"], dtype)
        actual = of_group(rewards)
        np.testing.assert_array_equal(actual, case["expected"]["advantage"])


def test_failed_completion_has_no_say():
    # mean 0.5, deviation 0.5 over the three rewarded: (0 - 0.5) / 0.5 is -1, not -0.8
    rewards = np.array([0.0, np.nan, 1.0, 1.0, 0.0])
    actual = of_group(rewards)
    np.testing.assert_allclose(actual, [-1, 0, 1, 1, -1], rtol=1e-5)
    assert actual[1] == 0


@pytest.mark.parametrize("rewards", [[np.nan, np.nan], [1.0, np.nan], [np.inf, 0.5], [0.25] * 4])
def test_group_without_two_different_rewards_has_no_variance(rewards):
    assert not has_variance(np.array(rewards))
    actual = of_group(rewards)
    np.testing.assert_array_equal(actual, 0)


def test_permuting_a_group_permutes_its_advantages():
    rng = np.random.default_rng(0)
    rewards, order = rng.normal(size=8), rng.permutation(8)
    straight = of_group(rewards)
    shuffled = of_group(rewards[order])
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="rlooo"):
        of_group([0.0, 1.0], "rlooo")


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others():
    # 1 - (0 + 0.5) / 2, 0 - (1 + 0.5) / 2, 0.5 - (1 + 0) / 2
    np.testing.assert_allclose(of_group([1.0, 0.0, 0.5], "leave_one_out"), [0.75, -0.75, 0.0])
    np.testing.assert_allclose(of_group([1.0, np.nan, 0.0], "leave_one_out"), [1.0, 0.0, -1.0])


@pytest.mark.parametrize(
    "rewards, k, expected",
    [
        # One of four correct: 3 of 6 pairs hold it. (1 - 1/2) / (1/2), and for a wrong one
        # (1/2 - C(2,1)/C(3,1)) / (1/2).
        ([1, 0, 0, 0], 2, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # Two of four: 5 of 6 pairs. (1/6) / sqrt(5/36), (1/6 - 1/3) / sqrt(5/36).
        ([1, 1, 0, 0], 2, [1 / 5**0.5, 1 / 5**0.5, -1 / 5**0.5, -1 / 5**0.5]),
        # k = 1 is the group norm of right and wrong.
        ([1, 0, 0, 0], 1, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ([1, 1, 1, 0], 2, [0, 0, 0, 0]),  # every pair holds a correct one
        ([1, 0], 8, [0, 0]),  # a group smaller than k passes or not as a whole
    ],
)
def test_pass_at_k_against_counted_draws(rewards, k, expected):
    found = of_group(np.array(rewards, float), "pass_at_k", pass_k=k)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 6])
def test_pass_at_k_against_all_draws(seed):
    """The mean over the draws that hold a completion of how the draw compares with all draws."""
    rng = np.random.default_rng(seed)
    N, k = int(rng.integers(3, 8)), int(rng.integers(1, 4))
    rewards = rng.integers(0, 2, N).astype(float)
    draws = list(itertools.combinations(range(N), k))
    passes = np.array([max(rewards[list(draw)]) for draw in draws])
    assert passes.std() > 0
    norm = (passes - passes.mean()) / passes.std()
    expected = [
        np.mean([n for draw, n in zip(draws, norm, strict=True) if i in draw]) for i in range(N)
    ]
    np.testing.assert_allclose(of_group(rewards, "pass_at_k", pass_k=k), expected, rtol=1e-5)


def test_a_batch_is_compared_with_itself():
    groups = [GroupRewards(np.array(each)) for each in ([3.0, 1.0], [0.0, np.nan], [2.0, 2.0])]
    # 3, 1, 0, 2, 2: mean 1.6, squares 1.96 + 0.36 + 2.56 + 0.16 + 0.16 = 5.2, deviation 1.0198
    found = batch_advantages(groups, AdvantageRule("batch_norm", eps=0.0))
    np.testing.assert_allclose(found[0], np.array([1.4, -0.6]) / 1.04**0.5, rtol=1e-6)
    np.testing.assert_allclose(found[1], np.array([-1.6, 0.0]) / 1.04**0.5, rtol=1e-6)
    np.testing.assert_allclose(found[2], np.array([0.4, 0.4]) / 1.04**0.5, rtol=1e-6)
    # Without the groups' means 1, -1, 0, 0, 0: deviation sqrt(2/5); one without others says nothing
    found = batch_advantages(groups, AdvantageRule("group_centre_batch_norm", eps=0.0))
    np.testing.assert_allclose(found[0], [2.5**0.5, -(2.5**0.5)], rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate(found[1:]), 0)


def test_each_reward_is_normed_alone_then_weighed_then_the_batch():
    """Two rewards: totals 1, 1 would be equal, but the second reward tells them apart."""
    first = GroupRewards(
        np.array([1.0, 1.0]), np.array([[1.0, 0.0], [0.0, 10.0]]), np.array([1.0, 0.5])
    )
    second = GroupRewards(
        np.array([0.0, np.nan]), np.array([[0.0, np.nan], [0.0, np.nan]]), np.array([1.0, 0.5])
    )
    # 1 - 0.5, -1 + 0.5, 0: mean 0, deviation sqrt(0.5 / 3)
    found = batch_advantages([first, second], AdvantageRule("reward_norm", eps=0.0))
    np.testing.assert_allclose(found[0], np.array([0.5, -0.5]) * 6**0.5, rtol=1e-6)
    np.testing.assert_array_equal(found[1], [0, 0])
    with pytest.raises(ValueError, match="each reward function"):
        of_group([0.0, 1.0], "reward_norm")


@pytest.mark.parametrize("kind", KINDS)
def test_laws_of_every_kind(kind):
    """Any order of groups and completions, a completion without reward, and equal rewards."""
    rng = np.random.default_rng(3)

    def group(rewards):
        return GroupRewards(np.array(rewards), np.array([rewards, rewards]), np.array([0.7, 0.3]))

    rewards = [rng.integers(0, 3, 6) / 2.0 for _ in range(4)]
    rule = AdvantageRule(kind, pass_k=2)
    straight = batch_advantages([group(each) for each in rewards], rule)
    turned = batch_advantages([group(each[::-1]) for each in rewards[::-1]], rule)
    for one, other in zip(straight, turned[::-1], strict=True):
        np.testing.assert_allclose(one, other[::-1], rtol=1e-6, atol=1e-7)
    more = batch_advantages([group([*each, np.nan]) for each in rewards], rule)
    for one, other in zip(straight, more, strict=True):
        np.testing.assert_allclose(one, other[:-1], rtol=1e-6, atol=1e-7)
        assert other[-1] == 0
    # The better of two completions of one prompt has the higher advantage, or the same.
    for each, advantages in zip(rewards, straight, strict=True):
        order = np.argsort(each)
        assert (np.diff(advantages[order]) >= -1e-6).all()
    for alike in (
        batch_advantages([group([0.35] * 8), group([0.35] * 3)], rule),
        batch_advantages([group([0.35])], rule),
        batch_advantages([], rule),
    ):
        assert not any(each.any() for each in alike)


def test_every_kind_is_in_the_configuration_and_no_other():
    field = AlgorithmConfig.model_fields["advantage"]
    assert set(typing.get_args(field.annotation)) == set(KINDS)


def test_a_reward_that_one_completion_lacks_counts_nothing_there():
    """Its other rewards do; a completion without any total has no advantage at all."""
    each = np.array([[1.0, 0.0, 0.0], [np.nan, 1.0, 0.0]])
    group = GroupRewards(np.array([1.0, 1.0, 0.0]), each, np.array([1.0, 1.0]))
    [found] = batch_advantages([group], AdvantageRule("reward_norm", eps=0.0))
    # sqrt(2), -1/sqrt(2) + 1, -1/sqrt(2) - 1: mean 0, before their deviation is divided by
    raw = np.array([2**0.5, -(2**-0.5) + 1, -(2**-0.5) - 1])
    np.testing.assert_allclose(found, raw / raw.std(), rtol=1e-6)
