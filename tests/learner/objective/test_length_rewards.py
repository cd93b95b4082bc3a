"""What lengths add to rewards, by hand."""

import numpy as np
import pytest

from learner.objective.length_rewards import LengthRule, length_rewards


def test_the_reward_falls_over_the_last_share_of_the_allowed_length():
    rule = LengthRule(overlong_share=0.25)
    tokens = np.array([1, 75, 80, 87, 100, 120])
    found = length_rewards(tokens, tokens, np.zeros(6), rule, max_completion_tokens=100)
    np.testing.assert_allclose(found, [0, 0, -0.2, -0.48, -1, -1])


def test_a_share_of_one_falls_from_the_first_token_on():
    rule = LengthRule(overlong_share=1.0)
    found = length_rewards(
        np.array([1, 5]), np.array([1, 5]), np.ones(2), rule, max_completion_tokens=10
    )
    np.testing.assert_allclose(found, [-0.1, -0.5])


def test_short_is_rewarded_among_the_correct_and_long_costs_all():
    rule = LengthRule(length_coef=2.0, correct_from=0.9)
    tokens, total = np.array([10, 20, 30, 10, 99]), np.array([1.0, 1.0, 0.0, 0.5, np.nan])
    found = length_rewards(tokens, tokens, total, rule, max_completion_tokens=100)
    # The last has no reward: the longest is 30. x = 0.5, 0, -0.5, 0.5, and what is wrong gains none
    np.testing.assert_allclose(found[:4], [1.0, 0.0, -1.0, 0.0])


@pytest.mark.parametrize("total", [[1.0, 0.0], [np.nan, np.nan]])
def test_equal_lengths_and_no_rewards_add_nothing(total):
    rule = LengthRule(length_coef=1.0)
    found = length_rewards(
        np.array([7, 7]), np.array([7, 7]), np.array(total), rule, max_completion_tokens=9
    )
    assert not found.any()


def test_it_is_off_as_it_stands():
    assert not LengthRule().is_on
    off = length_rewards(
        np.array([1, 2]), np.array([1, 2]), np.ones(2), LengthRule(), max_completion_tokens=9
    )
    assert not off.any()


def test_an_episode_of_several_records_is_too_long_where_a_record_is():
    """A record is what the limit bounds; what is compared within a group is the whole length."""
    rule = LengthRule(overlong_share=0.2)
    found = length_rewards(
        np.array([400, 400]), np.array([100, 128]), np.ones(2), rule, max_completion_tokens=128
    )
    np.testing.assert_allclose(found, [0.0, -1.0])
