"""Ends a process whose driver has asked it nothing for a while.

A process that is cut off from the driver is replaced, and must not hold on to what its successor
needs: the lock of the spool, devices, a port. No message can reach it. But the driver asks each
process every few seconds how it is, so that a long silence means that the process is replaced, or
that its driver is gone.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

LEASE_S = 120.0
"""A driver may be paused for so long, as by a migration of its host or a file system that stalls,
without harm to its processes. Past it they end, and a driver that comes back replaces them."""
TICK_S = 1.0
PAUSE_S = 5.0
"""A tick that is so late means that this process was paused itself."""
GRACE_S = 10.0
"""After a pause: for the questions that came meanwhile to be answered."""


class DriverLease:
    """The time that this process may go on without its driver; each question renews it."""

    def __init__(
        self,
        name: str,
        lease_s: float = LEASE_S,
        *,
        end: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """Nothing is watched before `start`.

        Args:
            name: of this process, for its last message.
            end: called with that message; None ends the process.
            now: seconds that never run backwards.
        """
        self._name = name
        self._lease_s = lease_s
        self._end = _end_process if end is None else end
        self._now = now
        self._asked_s = self._ticked_s = now()

    def start(self) -> None:
        """Checks from now on, in a thread that ends with the process."""
        self._asked_s = self._ticked_s = self._now()
        threading.Thread(target=self._run, name="driver-lease", daemon=True).start()

    def renew(self) -> None:
        """The driver has asked something."""
        self._asked_s = self._now()

    def check(self) -> None:
        """Ends the process if the lease is over."""
        now_s = self._now()
        paused = now_s - self._ticked_s > PAUSE_S
        self._ticked_s = now_s
        if paused:
            self._asked_s = max(self._asked_s, now_s - self._lease_s + GRACE_S)
        if now_s - self._asked_s > self._lease_s:
            self._end(
                f"{self._name}: the driver has asked nothing for {self._lease_s:g} s, so this "
                "process ends: another one may have taken its place"
            )

    def _run(self) -> None:
        while True:
            time.sleep(min(TICK_S, self._lease_s / 4))
            self.check()


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)  # a thread that hangs cannot hold it back
