"""What every tracker of metrics shares: a thread of its own behind a bounded queue.

A tracker is best effort. Nothing that it does, or fails to do, can delay or end a step: what does
not fit into the queue is dropped and counted, what its library raises becomes one warning a topic,
and the end waits for it no longer than asked.
"""

import abc
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Warn = Callable[[str], None]

QUEUED_LINES = 1000


class Tracker(abc.ABC):
    """Feeds one tracker from its thread; never raises into the caller."""

    def __init__(self, name: str, *, extra: str, warn: Warn, queue_lines: int = QUEUED_LINES):
        """Starts the thread; subclasses have their fields by then.

        Args:
            name: for messages.
            extra: of the installation, which brings the library.
            warn: receives each warning once; it must not raise.
            queue_lines: calls that may wait for the thread.
        """
        self._name = name
        self._extra = extra
        self._warn = warn
        self._warned: set[str] = set()
        self._queue: queue.Queue[Callable[[], Any] | None] = queue.Queue(queue_lines)
        self.dropped = 0
        """Lines that were dropped because the queue was full."""
        self.mode = "starting"
        """`starting`, one word for how it records, or `ended`."""
        self._thread = threading.Thread(target=self._work, name=extra, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queues the metrics of a step; returns at once."""
        self._put(lambda: self._write(step, values))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Queues completions of a step; returns at once."""
        self._put(lambda: self._write_samples(step, samples))

    def resume_at(self, step: int) -> None:
        """Queues that what was logged after this step does not count; returns at once."""
        self._put(lambda: self._rewind(step))

    def close(self, timeout_s: float) -> None:
        """Asks the thread to finish and waits no longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):  # the thread is stuck; the join below warns
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn_once(
                "close",
                f"{self._name} did not finish within {timeout_s:g} s: about "
                f"{self._queue.qsize()} lines were not sent; metrics.jsonl has them all",
            )
        elif self.dropped:
            self._warn_once("dropped", f"{self.dropped} lines never reached {self._name}")

    @abc.abstractmethod
    def _start(self) -> str | None:
        """Opens the record, in the thread; its mode, or None where that failed."""

    @abc.abstractmethod
    def _write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abc.abstractmethod
    def _write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None: ...

    @abc.abstractmethod
    def _rewind(self, step: int) -> None: ...

    @abc.abstractmethod
    def _finish(self) -> None: ...

    @abc.abstractmethod
    def _errors(self) -> tuple[type[Exception], ...]:
        """What the library raises of its own.

        Raises:
            ImportError: if it is not installed.
        """

    def _clean(self, message: str) -> str:
        """A message without what must not be shown."""
        return message

    def _put(self, call: Callable[[], Any]) -> None:
        if self.mode == "ended":
            self.dropped += 1
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self.dropped += 1
            self._warn_once(
                "queue", f"{self._name} is slower than training: some of its lines are dropped"
            )

    def _work(self) -> None:
        try:
            mode = self._start()
            if mode is not None:
                self.mode = mode
                while (call := self._queue.get()) is not None:
                    self._guarded("log", call)
                self._guarded("finish", self._finish)
        finally:
            self.mode = "ended"

    def _guarded(self, action: str, call: Callable[[], Any], then: str = "is left out") -> Any:
        """The result of a call into the library, or None and one warning: its errors end here.

        Any other exception ends this thread, and with it nothing but the tracker.
        """
        try:
            errors = self._errors()
        except ImportError:
            self._warn_once(
                "import", f"{self._name} is not installed: pip install '.[{self._extra}]'"
            )
            return None
        try:
            return call()
        except (*errors, OSError, RuntimeError, ValueError, TypeError) as error:
            text = self._clean(" ".join(f"{type(error).__name__}: {error}".split())[:300])
            self._warn_once(action, f"{self._name} {action} failed and {then}: {text}")
            return None

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self._warn(message)
