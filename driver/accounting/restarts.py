"""How often processes were started again lately, and how many hosts were lost.

Failures that come now and then, on one host or another, end no run however long it is; those that
come again and again on the same host do. The loss of a host is one event, whatever ran there, and
counts apart.
"""

import collections

WINDOW_S = 3600.0


class RestartLimit:
    """Counts restarts of one kind of process by host, within a window of time."""

    def __init__(self, allowed: int):
        """Args:
        allowed: crashes on one host within the window, and losses of one host.
        """
        self.allowed = allowed
        self._crashes: dict[str, collections.deque[float]] = {}
        self._losses: dict[str, collections.deque[float]] = {}
        self._lost_lives: set[str] = set()

    def count_crash(self, host: str, now_s: float) -> int:
        """Adds a process that ended on a host that is there; how many did within the window.

        Args:
            now_s: on a clock that only goes forward.
        """
        return _count(self._crashes, host, now_s)

    def count_lost_host(self, host: str, life: str, now_s: float) -> int:
        """Adds the loss of a host; how often it was lost within the window, 0 where this loss has
        been counted.

        Args:
            life: a name of the time from one start of the host to its end.
        """
        if life in self._lost_lives:
            return 0
        self._lost_lives.add(life)
        return _count(self._losses, host, now_s)


def _count(times: dict[str, collections.deque[float]], host: str, now_s: float) -> int:
    recent = times.setdefault(host, collections.deque())
    recent.append(now_s)
    while now_s - recent[0] > WINDOW_S:
        recent.popleft()
    return len(recent)
