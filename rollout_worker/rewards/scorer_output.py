"""What scorers print: shown beside the worker's own output, without secrets, up to a bound."""

import io
import os
import sys
import threading
from typing import IO

from services.wire.secret_text import SecretFilter

SHOWN_BYTES = 2**20
"""Of all children of a pool together; more is read and dropped, so that no scorer waits for it."""
_LINE_BYTES = 8192
"""A longer line is shown as several."""


class ScorerOutput:
    """Shows what the children of one pool print; safe from any thread."""

    def __init__(self, limit_bytes: int = SHOWN_BYTES):
        self._left = limit_bytes
        self._limit = limit_bytes
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
            if self._left <= 0:
                return
            text = self._filter.clean(line.decode("utf-8", "replace"))
            self._left -= len(line)
            if self._left <= 0:
                text += (
                    f"\nscorers have printed {self._limit} bytes: what else they print is dropped\n"
                )
            sys.stderr.write(text)
            sys.stderr.flush()
