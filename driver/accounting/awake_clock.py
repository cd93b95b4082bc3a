"""Time in which this process ran: while it was stopped, no other process was late.

A process that was stopped (SIGSTOP, a virtual machine that moves, a lid that closes, a file system
that hangs) finds on waking that every deadline has passed, although answers were merely not read.
"""

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

    def now(self) -> float:
        """Seconds since the start without pauses; each call is a look. For any thread."""
        with self._lock:
            at_s = time.monotonic()
            self._awake_s += min(at_s - self._seen_s, self._longest_tick_s)
            self._seen_s = at_s
            return self._awake_s
