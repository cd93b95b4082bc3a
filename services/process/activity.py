"""What a process is at and how far it has come, and how another one notices from it that it hangs.

A process answers from another thread than the one that works, so that its answers say nothing of a
hang in decoding, a push, a swap or an update. So each carries counters of what was done.

Compilations and checkpoints show no progress for as long as they take, which grows with the model;
what tells them from a hang is the phase that the working thread has open. They are bounded by
`placement.step_timeout_s` alone, and so are waits for another process, which has a bound itself.
"""

import dataclasses
from collections.abc import Mapping

from services.process.phases import UNCOUNTED

SHARE = 1 / 12
"""Of `placement.step_timeout_s`: the longest standstill, 300 s by default."""
GAP_S = 15.0
"""Reports that are further apart say nothing of the time between: one of the two was paused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activity:
    """The work of one process at one moment."""

    doing: str
    """A phase of the thread that works, or another word for what it waits for."""
    counters: Mapping[str, int]
    """Work that is done, such as tokens decoded; each only grows while the process works."""
    slack_s: float = 0.0
    """How long one piece of the work may take by configuration, such as a scorer's time limit."""

    @property
    def must_progress(self) -> bool:
        """Whether a counter has to grow before long: it does not wait for another process, and is
        at nothing that shows no progress, as a compilation or a checkpoint.
        """
        return self.doing not in UNCOUNTED


class HangWatch:
    """The reports of one process."""

    def __init__(self):
        self._last: Activity | None = None
        self._noted_s = 0.0
        self._still_s = 0.0
        """Seconds that the counters are known to stand."""

    def note(self, activity: Activity, now_s: float) -> None:
        """Takes a report.

        Args:
            now_s: on a clock that never runs backwards.
        """
        last, between_s = self._last, now_s - self._noted_s
        self._last, self._noted_s = activity, now_s
        stands = last is not None and last.must_progress and activity.must_progress
        if last is None or not stands or activity.counters != last.counters:
            self._still_s = 0.0
        elif between_s <= GAP_S:
            self._still_s += between_s

    def hang(self, step_timeout_s: float) -> str:
        """What it hangs in and since when; empty while it makes progress or need not."""
        if self._last is None or self._still_s <= SHARE * step_timeout_s + self._last.slack_s:
            return ""
        done = ", ".join(f"{name} {count}" for name, count in self._last.counters.items())
        return (
            f"no progress for {self._still_s:.0f} s in {self._last.doing} ({done}); if one piece "
            "of its work may take so long, set placement.step_timeout_s higher"
        )

    @property
    def doing(self) -> str:
        """As last reported; empty before."""
        return "" if self._last is None else self._last.doing

    @property
    def counters(self) -> dict[str, int]:
        """As last reported."""
        return {} if self._last is None else dict(self._last.counters)
