"""What scorers print: shown beside the worker's own output, without secrets, up to a bound."""

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from services.wire.secret_text import SecretFilter

SHOWN_BYTES = 2**20
"""Of all children of a pool together; more is read and dropped, so that no scorer waits for it."""
REFILL_BYTES_PER_S = 2**10
"""That are shown again as time goes by, so that a run of weeks does not fall silent."""
_LINE_BYTES = 8192
"""A longer line is shown as several."""


class ScorerOutput:
    """Shows what the children of one pool print; safe from any thread."""

    def __init__(self, limit_bytes: int = SHOWN_BYTES, now: Callable[[], float] = time.monotonic):
        """Args:
        limit_bytes: shown at once.
        now: seconds that never run backwards.
        """
        self._left: float = limit_bytes
        self._limit = limit_bytes
        self._now = now
        self._seen_s = now()
        self._said = False
        """Whether it was said that some is not shown, since half of the bound was there."""
        self._lock = threading.Lock()
        self._filter = SecretFilter(os.environ)

    def follow(self, pipe: IO[bytes]) -> threading.Thread:
        """Shows what comes out of a pipe until it ends, in a thread of its own, and closes it."""
        thread = threading.Thread(target=self._show_all, args=(pipe,), daemon=True)
        thread.start()
        return thread

    def _show_all(self, pipe: IO[bytes]) -> None:
        with pipe, io.BufferedReader(pipe) as lines:  # pyright: ignore[reportArgumentType]
            while line := lines.readline(_LINE_BYTES):
                self._show(line)

    def _show(self, line: bytes) -> None:
        with self._lock:
            now = self._now()
            self._left = min(self._limit, self._left + REFILL_BYTES_PER_S * (now - self._seen_s))
            self._seen_s = now
            self._said = self._said and self._left < self._limit / 2
            if self._left >= len(line):
                self._left -= len(line)
                text = self._filter.clean(line.decode("utf-8", "replace"))
            elif not self._said:
                self._said = True
                text = (
                    f"scorers print more than is shown: at most {self._limit} bytes at once, and "
                    f"{REFILL_BYTES_PER_S} a second after that\n"
                )
            else:
                return
            sys.stderr.write(text)
            sys.stderr.flush()
