"""How many groups waited and were with workers during a step."""

import time
from collections.abc import Sequence
from typing import NamedTuple

GAUGE_S = 0.25
"""Between two records of queues that do not change."""
_MOST_KEPT = 4096


class Gauge(NamedTuple):
    """The queues at one moment."""

    at_s: float
    """On the driver's monotonic clock."""
    waiting: int
    """Groups in the learner's buffer that it was not yet asked to train on."""
    out: int
    """Groups leased to workers."""
    policy_version: int


class QueueGauges:
    """Records queue lengths during one step; redundant records are dropped."""

    def __init__(self):
        self._seen: list[Gauge] = []
        self.newest = Gauge(time.monotonic(), 0, 0, -1)

    def record_counts(self, waiting: int, out: int, policy_version: int) -> None:
        """Records the current lengths, if they changed or the last record is old."""
        before, self.newest = self.newest, Gauge(time.monotonic(), waiting, out, policy_version)
        changed = self.newest[1:] != before[1:]
        if not self._seen or changed or self.newest.at_s - self._seen[-1].at_s >= GAUGE_S:
            self._seen.append(self.newest)
        if len(self._seen) > _MOST_KEPT:
            self._seen = spread(self._seen, _MOST_KEPT // 2)

    def take_gauges(self) -> list[Gauge]:
        """The records since the last call."""
        seen, self._seen = self._seen, []
        return seen


def queue_metrics(gauges: Sequence[Gauge], until_s: float) -> dict[str, float]:
    """Mean over time and maximum of both queues, as `queue/*`; empty without records.

    Args:
        until_s: end of the time that the last record stands for.
    """
    if not gauges:
        return {}
    metrics = {}
    ends_s = [*(one.at_s for one in gauges[1:]), max(until_s, gauges[-1].at_s)]
    lasted_s = [end_s - one.at_s for one, end_s in zip(gauges, ends_s, strict=True)]
    for name in ("waiting", "out"):
        counts = [getattr(one, name) for one in gauges]
        total = sum(n * s for n, s in zip(counts, lasted_s, strict=True))
        whole_s = sum(lasted_s)
        metrics[f"queue/{name}_mean"] = total / whole_s if whole_s else float(counts[-1])
        metrics[f"queue/{name}_max"] = float(max(counts))
    return metrics


def spread(gauges: Sequence[Gauge], most: int) -> list[Gauge]:
    """At most `most` of the records, evenly chosen, the first and the last included."""
    if len(gauges) <= most:
        return list(gauges)
    return [gauges[round(i * (len(gauges) - 1) / (most - 1))] for i in range(most)]
