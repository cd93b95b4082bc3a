"""SIGINT, SIGTERM and SIGHUP as a flag that the step loop checks.

The first signal asks for an orderly end: the loop sees it at its next wait. A second one ends the
process at once, for a user who does not want to wait for the checkpoint.
"""

import os
import signal
from collections.abc import Callable

from driver.errors import RunError


class Interrupted(RunError):
    """The run was asked to end; its exit code is 128 + signal number, as shells count."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class StopSignal:
    """Remembers the first SIGINT, SIGTERM or SIGHUP (a closed terminal)."""

    def __init__(self):
        self._signum: int | None = None
        self._acknowledged = False
        self.before_abort: Callable[[int], None] = lambda exit_code: None
        """Called when a further signal ends the process at once."""

    def install(self) -> None:
        """Takes over the signals; again after ray.init, which sets a handler of its own."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGHUP, self._handle)

    def _handle(self, signum: int, frame) -> None:
        if self._signum is not None:
            self.before_abort(128 + signum)
            os._exit(128 + signum)
        self._signum = signum

    def check(self) -> None:
        """Raises Interrupted once a signal has come, until it is acknowledged."""
        if self._signum is not None and not self._acknowledged:
            raise Interrupted(self._signum)

    def acknowledge(self) -> None:
        """Lets the orderly end wait for things itself."""
        self._acknowledged = True
