"""How often processes were started again lately, and how many hosts were lost.

Failures that come now and then, on one host or another, end no run however long it is; those that
come again and again on the same host do. The loss of a host is one event, whatever ran there, and
counts apart.
"""

import collections
import math

WINDOW_S = 3600.0
SAME_LOSS_S = 180.0
"""Processes that are missed within this time of each other were lost with their host at once; one
that is missed later, on a host that was never known to be gone, is another loss."""


class RestartLimit:
    """Counts restarts of one kind of process by host, within a window of time."""

    def __init__(self, allowed: int):
        """Args:
        allowed: crashes on one host within the window, and losses of one host.
        """
        self.allowed = allowed
        self._crashes: dict[str, collections.deque[float]] = {}
        self._losses: dict[str, collections.deque[float]] = {}
        self._lost_lives: dict[str, float] = {}
        """When the loss was counted."""

    def count_end(self, host: str, life: str, now_s: float, *, host_is_there: bool) -> int:
        """Adds a process that has ended, or the loss of its host.

        Args:
            life: a name of the time from one start of the host to its end.
            now_s: on a clock that only goes forward.
            host_is_there: whether this life goes on.

        Returns:
            how often processes ended there within the window, or how often the host was lost; 0
            where this loss has been counted a moment ago.
        """
        if host_is_there:
            return _count(self._crashes, host, now_s)
        if now_s - self._lost_lives.get(life, -math.inf) < SAME_LOSS_S:
            return 0
        self._lost_lives[life] = now_s
        return _count(self._losses, host, now_s)


def _count(times: dict[str, collections.deque[float]], host: str, now_s: float) -> int:
    recent = times.setdefault(host, collections.deque())
    recent.append(now_s)
    while now_s - recent[0] > WINDOW_S:
        recent.popleft()
    return len(recent)
