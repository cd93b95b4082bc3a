"""Threads whose errors reach their owner.

The error that ends a thread is kept, and raised at the owner's next check with the thread's
traceback.
"""

import threading
from collections.abc import Callable


class BackgroundFailed(RuntimeError):
    """A background thread ended with an error, which is this one's cause."""


class Background:
    """One supervised thread, started at once."""

    def __init__(
        self,
        name: str,
        run: Callable[[], None],
        on_failure: Callable[[], None] = lambda: None,
    ):
        """Args:
        name: of the thread, for errors and stack dumps.
        run: returns when its owner signals the end.
        on_failure: wakes threads that wait for this one's results; called in this thread.
        """
        self._run = run
        self._on_failure = on_failure
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raises BackgroundFailed from what ended the thread, if an error did."""
        if self.failure is not None:
            raise BackgroundFailed(
                f"{self._thread.name} failed: {type(self.failure).__name__}: {self.failure}"
            ) from self.failure

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; False if it did not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # raised at the next check
            self.failure = error
            self._on_failure()
