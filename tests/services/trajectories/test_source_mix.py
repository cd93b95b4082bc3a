"""The mixture of sources: exact shares at every index, from the index alone."""

import math
import random

import pytest

from services.trajectories.source_mix import draw_at, draws_before, shares_of

BOUND = 1.7


def sources_of(weights, count):
    shares = shares_of(weights)
    return "".join("ABCDEFGHIJKLMNOP"[draw_at(shares, index)[0]] for index in range(count))


def test_the_order_of_sources_is_the_same_on_every_machine_and_version():
    assert sources_of([5, 3, 2], 20) == "ABACABACABABACABACAB"
    assert sources_of([1], 5) == "AAAAA"
    assert sources_of([1, 1], 6) == "ABABAB"
    assert sources_of([1, 1, 1], 9) == "BACBACBAC"
    assert sources_of([0.1, 0.9], 11) == "BBBBBABBBBB"


def test_only_the_ratio_of_the_weights_counts_as_it_is_written():
    assert shares_of([5, 3, 2]) == shares_of([0.5, 0.3, 0.2]) == shares_of([5e300, 3e300, 2e300])


def weights_of(name):
    draw = random.Random(name)
    kinds = {
        "equal": lambda: 1.0,
        "even": draw.random,
        "far apart": lambda: 10.0 ** draw.uniform(-9, 9),
        "golden": lambda: 1.618 ** draw.randint(0, 12),
        "small whole": lambda: draw.randint(1, 5),
    }
    return [kinds[name]() + 1e-12 for _ in range(draw.randint(2, 13))]


@pytest.mark.parametrize("name", ["equal", "even", "far apart", "golden", "small whole"])
def test_each_source_has_its_share_at_every_index(name):
    shares = shares_of(weights_of(name))
    drawn = [0] * len(shares)
    for index in range(400):
        assert draws_before(shares, index) == tuple(drawn)
        for count, share in zip(drawn, shares, strict=True):
            assert abs(count - share * index) < BOUND, index
        source, ordinal = draw_at(shares, index)
        assert ordinal == drawn[source], "without gap and repetition"
        drawn[source] += 1


def test_an_index_far_ahead_is_found_at_once():
    shares = shares_of([5, 3, 2])
    assert draws_before(shares, 10**15) == (5 * 10**14, 3 * 10**14, 2 * 10**14)
    assert draw_at(shares, 10**15 + 3) == (2, 2 * 10**14)


def test_a_period_of_whole_weights_is_exact():
    shares = shares_of([7, 1, 3, 1])
    assert all(draws_before(shares, 12 * n) == (7 * n, n, 3 * n, n) for n in range(50))


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, math.nan], [math.inf, 1]])
def test_weights_that_give_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="finite weights above 0, got"):
        shares_of(weights)
