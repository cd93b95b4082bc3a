"""Restarts are counted by host and window, and the loss of a host apart and once."""

from driver.accounting.restarts import WINDOW_S, RestartLimit


def test_crashes_count_on_their_own_host_and_within_the_window():
    limit = RestartLimit(3)
    assert [limit.count_crash("a", s) for s in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert limit.count_crash("b", 3.0) == 1
    assert limit.count_crash("a", WINDOW_S + 1.5) == 2, "those of 0 s and 1 s are too old"


def test_a_crash_now_and_then_never_adds_up_however_long_the_run():
    limit = RestartLimit(3)
    days = [limit.count_crash("a", 6 * WINDOW_S * n) for n in range(100)]
    assert set(days) == {1}


def test_the_loss_of_a_host_counts_once_and_apart_from_crashes_F02():
    limit = RestartLimit(3)
    limit.count_crash("a", 0.0)
    assert limit.count_lost_host("a", "first life", 1.0) == 1
    assert limit.count_lost_host("a", "first life", 2.0) == 0, "whatever else ran there"
    assert limit.count_lost_host("a", "second life", 3.0) == 2
    assert limit.count_lost_host("b", "its life", 4.0) == 1
    assert limit.count_crash("a", 5.0) == 2
