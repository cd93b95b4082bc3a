"""How many tokens a second were decoded, where a step's tokens are not of its own seconds."""

import pytest

from driver.reports.step_report import RECENT_STEPS, DecodeRate


def test_a_synchronous_step_stands_for_itself():
    rate = DecodeRate(0)
    assert rate.add_step(100.0, 0.5) == 200.0
    assert rate.add_step(100.0, 0.25) == 400.0
    assert rate.add_step(100.0, 0.0) is None


def test_of_asynchronous_steps_sums_count():
    """A step whose groups were decoded before it is no step of a million tokens a second."""
    rate = DecodeRate(1)
    assert rate.add_step(1000.0, 0.5) == 2000.0
    assert rate.add_step(1000.0, 0.0005) == pytest.approx(2000.0 / 0.5005)
    assert rate.add_step(1000.0, 0.0) is None
    for _ in range(RECENT_STEPS):
        last = rate.add_step(1000.0, 1.0)
    assert last == 1000.0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_seconds_of_the_start_count_with_the_first_step_whose_groups_they_decoded(max_staleness):
    rate = DecodeRate(max_staleness)
    rate.add_earlier(0.4)
    rate.add_earlier(0.3)
    assert rate.add_step(100.0, 0.1) == pytest.approx(100.0 / 0.8)
    assert rate.add_step(700.0, 0.8) == pytest.approx(875.0 if not max_staleness else 500.0)
