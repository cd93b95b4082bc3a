"""Intervals and pass@k against values worked out by hand."""

import itertools
import math

import pytest

from driver.accounting.accuracy import Accuracy, pass_at_k, sign_test, wilson_interval


def test_wilson_interval_of_half_in_ten():
    # z^2 = 3.8416; centre 0.5; half width 1.96 sqrt(0.025 + 0.009604) / 1.38416 = 0.263410
    assert wilson_interval(5, 10) == pytest.approx((0.236590, 0.763410), abs=1e-6)


def test_wilson_interval_at_the_ends_has_a_width_and_stays_inside():
    # high = (z^2/n) / (1 + z^2/n) = 0.38416 / 1.38416
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.277540, abs=1e-6))
    assert wilson_interval(10, 10) == (pytest.approx(0.722460, abs=1e-6), 1.0)


def test_wilson_interval_mirrors():
    low, high = wilson_interval(30, 200)
    assert wilson_interval(170, 200) == pytest.approx((1 - high, 1 - low))


def test_wilson_interval_refuses_the_impossible():
    for successes, n in [(0, 0), (3, 2), (-1, 2)]:
        with pytest.raises(ValueError, match=f"successes={successes}, n={n}"):
            wilson_interval(successes, n)


def test_pass_at_k_by_hand():
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    assert 0 < pass_at_k(10_000, 1, 1) < 1


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one():
    for n, c in [(6, 1), (6, 3), (7, 7)]:
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_the_impossible():
    for n, c, k in [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)]:
        with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
            pass_at_k(n, c, k)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="3 right answers of 2"):
        Accuracy(correct=3, total=2)


@pytest.mark.parametrize(
    "better, worse, p_value",
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (3, 1, 2 * (1 + 4) / 16),
        (7, 7, 1.0),
        # 21 of 100 or fewer: 2 x sum of C(100, i) for i up to 21, over 2^100.
        (79, 21, 2 * sum(math.comb(100, i) for i in range(22)) / 2**100),
    ],
)
def test_the_sign_test_counts_what_is_as_uneven_or_more(better, worse, p_value):
    assert sign_test(better, worse) == pytest.approx(p_value, rel=1e-12)


def test_the_sign_test_of_many_pairs_neither_overflows_nor_takes_long():
    assert 0 < sign_test(5_200, 4_800) < 1e-4
    assert sign_test(10_000, 0) == 0.0  # below the least positive float


def test_the_sign_test_refuses_negative_numbers():
    with pytest.raises(ValueError, match="better=-1"):
        sign_test(-1, 3)
