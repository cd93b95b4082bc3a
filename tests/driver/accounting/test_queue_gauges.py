import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.accounting.queue_gauges import Gauge, QueueGauges, queue_metrics, spread


@given(st.lists(st.integers(0, 10**6), max_size=300), st.integers(2, 80))
def test_spread_keeps_ends_and_order(moments, most):
    gauges = [Gauge(float(t), 0, 0, 0) for t in sorted(moments)]
    kept = spread(gauges, most)
    assert len(kept) == min(most, len(gauges)) and kept == sorted(kept)
    assert kept[:1] == gauges[:1] and kept[-1:] == gauges[-1:]


def test_queues_are_recorded_when_they_change_and_from_time_to_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("driver.accounting.queue_gauges.time.monotonic", lambda: now[0])
    queues = QueueGauges()
    for at, waiting, out in [(0, 0, 0), (0.01, 0, 16), (0.02, 0, 16), (0.2, 4, 12), (0.5, 4, 12)]:
        now[0] = 100.0 + at
        queues.record_counts(waiting, out, 3)
    seen = queues.take_gauges()
    assert [round(one.at_s - 100.0, 2) for one in seen] == [0.0, 0.01, 0.2, 0.5]
    assert queues.take_gauges() == [] and queues.newest[1:] == (4, 12, 3)
    metrics = queue_metrics(seen, 101.0)
    assert metrics["queue/waiting_mean"] == pytest.approx(4 * 0.8)
    assert metrics["queue/out_mean"] == pytest.approx(16 * 0.19 + 12 * 0.8)
    assert (metrics["queue/waiting_max"], metrics["queue/out_max"]) == (4.0, 16.0)
    assert queue_metrics([], 101.0) == {}
    assert queue_metrics([Gauge(5.0, 2, 3, 1)], 5.0)["queue/waiting_mean"] == 2.0
