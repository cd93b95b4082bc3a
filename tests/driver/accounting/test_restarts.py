"""Restarts are counted by host and window, and the loss of a host apart and once."""

from driver.accounting.restarts import SAME_LOSS_S, WINDOW_S, RestartLimit


class Limit(RestartLimit):
    def crash(self, host: str, now_s: float) -> int:
        return self.count_end(host, "its life", now_s, host_is_there=True)

    def lost(self, host: str, life: str, now_s: float) -> int:
        return self.count_end(host, life, now_s, host_is_there=False)


def test_crashes_count_on_their_own_host_and_within_the_window():
    limit = Limit(3)
    assert [limit.crash("a", s) for s in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert limit.crash("b", 3.0) == 1
    assert limit.crash("a", WINDOW_S + 1.5) == 2, "those of 0 s and 1 s are too old"


def test_a_crash_now_and_then_never_adds_up_however_long_the_run():
    limit = Limit(3)
    assert {limit.crash("a", 6 * WINDOW_S * n) for n in range(100)} == {1}


def test_the_loss_of_a_host_counts_once_and_apart_from_crashes_F02():
    limit = Limit(3)
    limit.crash("a", 0.0)
    assert limit.lost("a", "first life", 1.0) == 1
    assert limit.lost("a", "first life", 2.0) == 0, "whatever else ran there"
    assert limit.lost("a", "second life", 3.0) == 2
    assert limit.lost("b", "its life", 4.0) == 1
    assert limit.crash("a", 5.0) == 2


def test_a_host_that_goes_and_comes_under_one_name_is_counted_each_time():
    """Ray did not miss it: the node keeps its name, and was never known to be gone."""
    limit = Limit(3)
    times = [n * 1.5 * SAME_LOSS_S for n in range(5)]
    assert [limit.lost("a", "its life", s) for s in times] == [1, 2, 3, 4, 5]
    assert limit.lost("a", "its life", times[-1] + SAME_LOSS_S / 2) == 0
