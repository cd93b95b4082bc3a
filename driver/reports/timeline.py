"""What each process of a run did when: timeline.jsonl, one line a step.

The seconds of a step are in ledger.jsonl; here is how they lie in it, and how many groups waited
and were out meanwhile.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from driver.accounting.step_timing import PlacedTiming, RunTiming
from driver.reports.jsonl import JsonlLog
from services.process.phases import PHASES

GAUGE_S = 0.25
"""Between two notes of queues that do not change."""
MOST_GAUGES = 60
"""Of a step."""
_MOST_KEPT = 4096
DECIMALS = 4
"""Of seconds."""
_INDEX = {phase: index for index, phase in enumerate(PHASES)}


class Gauge(NamedTuple):
    """The queues at one moment."""

    at_s: float
    """On the driver's monotonic clock."""
    waiting: int
    """Groups that the learner holds and was not asked to train on."""
    out: int
    """Groups leased to workers."""
    policy_version: int


class QueueGauges:
    """Looks at the queues of one step; how often it is told does not matter."""

    def __init__(self):
        self._seen: list[Gauge] = []
        self.newest = Gauge(time.monotonic(), 0, 0, -1)

    def record_counts(self, waiting: int, out: int, policy_version: int) -> None:
        """Notes how the queues are now, where that is new or was not said for a while."""
        before, self.newest = self.newest, Gauge(time.monotonic(), waiting, out, policy_version)
        changed = self.newest[1:] != before[1:]
        if not self._seen or changed or self.newest.at_s - self._seen[-1].at_s >= GAUGE_S:
            self._seen.append(self.newest)
        if len(self._seen) > _MOST_KEPT:
            self._seen = spread(self._seen, _MOST_KEPT // 2)

    def take_gauges(self) -> list[Gauge]:
        """What was seen since the last call."""
        seen, self._seen = self._seen, []
        return seen


def queue_metrics(gauges: Sequence[Gauge], until_s: float) -> dict[str, float]:
    """Mean over time and most of both queues, as `queue/*`; nothing where nobody looked.

    Args:
        until_s: until when it was as the last of them says.
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
    """At most so many of them, evenly chosen, the first and the last included."""
    if len(gauges) <= most:
        return list(gauges)
    return [gauges[round(i * (len(gauges) - 1) / (most - 1))] for i in range(most)]


def timeline_record(
    step: int, timings: RunTiming, gauges: Sequence[Gauge], *, start_s: float, unix_s: float
) -> dict[str, Any]:
    """One step, as it stands in timeline.jsonl; times are seconds after its start.

    Args:
        start_s: where the step began, on the driver's monotonic clock.
        unix_s: Unix time of timings.at_s.
    """
    return {
        "step": step,
        "start": unix_s - (timings.at_s - start_s),
        "end": unix_s,
        "processes": {name: _track(timing, start_s) for name, timing in timings.by_process.items()},
        "gauges": [
            [round(at_s - start_s, DECIMALS), *counts]
            for at_s, *counts in spread(gauges, MOST_GAUGES)
        ],
    }


class Timeline:
    """Owns timeline.jsonl."""

    def __init__(self, folder: pathlib.Path, *, enabled: bool):
        self._log = JsonlLog(folder / "timeline.jsonl") if enabled else None

    def record_step(
        self, step: int, timings: RunTiming, gauges: Sequence[Gauge], *, start_s: float
    ) -> None:
        """Writes a step down whose timings were just taken."""
        if self._log is not None:
            unix_s = time.time() - (time.monotonic() - timings.at_s)
            self._log.append(timeline_record(step, timings, gauges, start_s=start_s, unix_s=unix_s))

    def rewind(self, step: int) -> int:
        """Goes on after this step; returns how many later lines moved aside."""
        return 0 if self._log is None else self._log.rewind(step)

    def close_log(self) -> None:
        if self._log is not None:
            self._log.close()


def _track(placed: PlacedTiming, start_s: float) -> dict[str, Any]:
    shift_s = placed.ahead_s - start_s
    moments = [round(span.start_s + shift_s, DECIMALS) for span in placed.timing.spans]
    moments.append(round(placed.timing.end_s + shift_s, DECIMALS))
    spans = zip(placed.timing.spans, moments[:-1], moments[1:], strict=True)
    return {
        "spans": [
            [_INDEX[span.phase], start, round(end - start, DECIMALS)] for span, start, end in spans
        ],
        "marks": [[round(at_s + shift_s, DECIMALS), text] for at_s, text in placed.timing.marks],
    }
