"""Time in which this process ran: while it was stopped, no other process was late.

A process that was stopped (SIGSTOP, a virtual machine that moves, a lid that closes, a file system
that hangs) finds on waking that every deadline has passed, although answers were merely not read.
"""

import collections
import threading
import time

LONGEST_TICK_S = 5.0
"""Between two looks at the clock; what is beyond was a pause."""


class AwakeClock:
    """A monotonic clock that counts no pause of its own process."""

    def __init__(self, longest_tick_s: float = LONGEST_TICK_S):
        """Starts at 0.

        Args:
            longest_tick_s: that counts between two looks; who judges deadlines looks more often.
        """
        self._longest_tick_s = longest_tick_s
        self._lock = threading.Lock()
        self._seen_s = time.monotonic()
        self._awake_s = 0.0
        self._pauses: collections.deque[tuple[float, float]] = collections.deque(maxlen=16)
        """Length of each of the last pauses, and when it ended on this clock."""

    def now(self) -> float:
        """Seconds since the start without pauses; each call is a look. For any thread."""
        with self._lock:
            at_s = time.monotonic()
            passed_s, self._seen_s = at_s - self._seen_s, at_s
            self._awake_s += min(passed_s, self._longest_tick_s)
            if passed_s > self._longest_tick_s:
                self._pauses.append((passed_s, self._awake_s))
            return self._awake_s

    def woke_lately(self, pause_s: float, within_s: float) -> bool:
        """Whether a pause of at least `pause_s` has ended in the last `within_s` on this clock."""
        since_s = self.now() - within_s
        with self._lock:
            return any(long_s >= pause_s and end_s >= since_s for long_s, end_s in self._pauses)
