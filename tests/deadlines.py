"""The one bound of every wait in the tests: it ends what hangs, and never judges a machine."""

import time

HANG_S = 300.0
"""Far longer than anything takes on a loaded machine; less than the `timeout` of pytest."""


def wait_until(condition, what: str, every_s: float = 0.02) -> None:
    """Returns once `condition()` is true.

    Raises:
        AssertionError: if that takes HANG_S; names `what` was waited for.
    """
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {HANG_S:g} s for {what}"
        time.sleep(every_s)
