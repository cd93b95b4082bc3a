"""Which phase of a step every second of this process belongs to.

A clock gives each moment to exactly one phase, so the phases of a step timing add up to its wall
time; moments outside every phase are `unexplained`. What happened when goes with each timing
(`span_log.py`).
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from services.process.phases import PHASES, UNEXPLAINED
from services.process.span_log import (
    MOST_MARKS,
    MOST_SPANS,
    Mark,
    SpanLog,
    StepTiming,
    seconds_of,
    thinned,
)


class PhaseClock:
    """Exclusive seconds by phase; a nested phase pauses the one around it.

    The thread that opens a phase owns the clock until it has closed its outermost one: two
    threads cannot both spend the same second.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        """Starts the first timing interval.

        Args:
            now: seconds that never run backwards.
        """
        self._now = now
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._open: list[str] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._earlier = dict.fromkeys(PHASES, 0.0)
        """Of all intervals that have ended."""
        self._charged_until = now()
        self._log = SpanLog(self._charged_until)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Gives the time inside the `with` to one phase, also when it ends in an exception.

        Raises:
            ValueError: if the phase is unknown, or is `unexplained`.
            RuntimeError: if another thread has a phase open.
        """
        if name not in PHASES or name == UNEXPLAINED:
            known = tuple(phase for phase in PHASES if phase != UNEXPLAINED)
            raise ValueError(f"phase must be one of {known}, got {name!r}")
        with self._lock:
            self._check_owner(name)
            self._charge()
            self._owner = threading.get_ident()
            self._open.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._charge()
                self._open.pop()
                if not self._open:
                    self._owner = None

    @property
    def current(self) -> str:
        """The innermost open phase; `unexplained` outside every one."""
        with self._lock:
            return self._open[-1] if self._open else UNEXPLAINED

    def mark(self, text: str) -> None:
        """Notes that something happens now, such as `version 7`; from any thread."""
        with self._lock:
            self._marks.append(Mark(self._now(), text))

    def take_timing(self, until_s: float | None = None) -> StepTiming:
        """Ends the interval and returns its timing; open phases go on. For any thread.

        Args:
            until_s: the moment at which it is to end, on this clock; later seconds belong to the
                next interval. None is now, and so is a future moment; one before this
                interval gives an empty timing.
        """
        with self._lock:
            self._charge()
            taken_s, start_s = self._charged_until, self._log.start_s
            spans, later = self._log.cut(taken_s if until_s is None else until_s)
            end_s = self._log.start_s
            rest = dict.fromkeys(PHASES, 0.0) | seconds_of(later)
            seconds = {phase: max(0.0, s - rest[phase]) for phase, s in self._seconds.items()}
            self._earlier = {phase: self._earlier[phase] + seconds[phase] for phase in PHASES}
            self._seconds = rest
            marks = tuple(mark for mark in self._marks if mark.at_s <= end_s)
            for _ in marks:
                self._marks.popleft()
        return StepTiming(
            start_s=start_s,
            end_s=end_s,
            taken_s=taken_s,
            seconds=seconds,
            spans=tuple(thinned(spans, most=MOST_SPANS)),
            marks=marks,
        )

    def peek(self) -> dict[str, float]:
        """Seconds of the interval so far for every phase, without ending it."""
        with self._lock:
            self._charge()
            return dict(self._seconds)

    def total(self) -> dict[str, float]:
        """Seconds since the start for every phase, whatever intervals ended meanwhile."""
        with self._lock:
            self._charge()
            return {phase: self._earlier[phase] + self._seconds[phase] for phase in PHASES}

    def _charge(self) -> None:
        """Gives the time since the last charge to the innermost open phase."""
        now = self._now()
        if now > self._charged_until:
            current = self._open[-1] if self._open else UNEXPLAINED
            self._seconds[current] += now - self._charged_until
            self._charged_until = now
            self._log.add_span(current, now)

    def _check_owner(self, phase: str) -> None:
        if self._owner not in (None, threading.get_ident()):
            raise RuntimeError(
                f"cannot enter phase {phase!r} from thread {threading.current_thread().name!r}: "
                f"another thread is in phase {self._open[-1]!r}; give every thread a clock of its "
                "own"
            )
