"""Advantages against the public cases, and the laws they obey."""

import numpy as np
import pytest

from learner.update.advantages import group_advantages, has_variance


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
            actual = group_advantages(np.array(rewards), kind=kind, eps=eps)
            if not any(expected):
                np.testing.assert_array_equal(actual, np.zeros(len(expected)))
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_float32_rewards_leave_no_residue_L07b(cases):
    case = cases("loss")["L07b"]
    for dtype in (np.float32, np.float64):
        rewards = np.array(case["input"]["rewards"], dtype)
        actual = group_advantages(rewards, kind="group_norm", eps=1e-6)
        np.testing.assert_array_equal(actual, case["expected"]["advantage"])


def test_failed_completion_has_no_say():
    # mean 0.5, deviation 0.5 over the three rewarded: (0 - 0.5) / 0.5 is -1, not -0.8
    rewards = np.array([0.0, np.nan, 1.0, 1.0, 0.0])
    actual = group_advantages(rewards, kind="group_norm", eps=1e-6)
    np.testing.assert_allclose(actual, [-1, 0, 1, 1, -1], rtol=1e-5)
    assert actual[1] == 0


@pytest.mark.parametrize("rewards", [[np.nan, np.nan], [1.0, np.nan], [np.inf, 0.5], [0.25] * 4])
def test_group_without_two_different_rewards_has_no_variance(rewards):
    assert not has_variance(np.array(rewards))
    actual = group_advantages(np.array(rewards), kind="group_norm", eps=1e-6)
    np.testing.assert_array_equal(actual, 0)


def test_permuting_a_group_permutes_its_advantages():
    rng = np.random.default_rng(0)
    rewards, order = rng.normal(size=8), rng.permutation(8)
    straight = group_advantages(rewards, kind="group_norm", eps=1e-6)
    shuffled = group_advantages(rewards[order], kind="group_norm", eps=1e-6)
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="rloo"):
        group_advantages(np.array([0.0, 1.0]), kind="rloo", eps=1e-6)
