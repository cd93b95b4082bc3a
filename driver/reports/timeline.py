"""The phases of each process with their times: timeline.jsonl, one line a step.

The seconds of a step are in ledger.jsonl; here is how they lie in it, and how many groups waited
and were with workers.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

from driver.accounting.jsonl import JsonlLog
from driver.accounting.queue_gauges import Gauge, spread
from driver.accounting.step_timing import PlacedTiming, RunTiming
from services.process.phases import PHASES

MOST_GAUGES = 60
"""Of a step."""
DECIMALS = 4
"""Of seconds."""
_INDEX = {phase: index for index, phase in enumerate(PHASES)}


def timeline_record(
    step: int, timings: RunTiming, gauges: Sequence[Gauge], *, start_s: float, unix_s: float
) -> dict[str, Any]:
    """One step, as timeline.jsonl has it; times are seconds after its start.

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
        """Writes a step whose timings were just collected."""
        if self._log is not None:
            unix_s = time.time() - (time.monotonic() - timings.at_s)
            self._log.append(timeline_record(step, timings, gauges, start_s=start_s, unix_s=unix_s))

    def rewind(self, step: int) -> int:
        """Goes on after this step; returns how many later lines moved aside."""
        return 0 if self._log is None else self._log.rewind(step)

    def close_log(self) -> None:
        """Closes timeline.jsonl."""
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
