"""Signals that end an A/B comparison: its child process first, then its folder, then itself."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0
"""How long a child may take to end before it is killed."""


class ComparisonInterrupted(Exception):
    """One of SIGNALS arrived."""

    def __init__(self, number: int):
        super().__init__("interrupted")
        self.exit_code = 128 + number


class Interrupts:
    """Turns the first of SIGNALS into ComparisonInterrupted, once, and only within `raised`."""

    def __init__(self):
        self._number: int | None = None
        self._is_raising = False

    def __enter__(self) -> "Interrupts":
        self._before = {each: signal.getsignal(each) for each in SIGNALS}
        for each, handler in self._before.items():
            if handler != signal.SIG_IGN:  # nohup and `&` of a script have it so
                signal.signal(each, self._note)
        return self

    def __exit__(self, *_) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, number, frame) -> None:
        if self._number is None:
            self._number = number
            self._raise_noted()

    def _raise_noted(self) -> None:
        if self._is_raising and self._number is not None:
            self._is_raising = False
            raise ComparisonInterrupted(self._number)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """In this block a signal raises ComparisonInterrupted; an earlier one raises at once."""
        self._is_raising = True
        try:
            self._raise_noted()
            yield
        finally:
            self._is_raising = False

    def run(self, command: Sequence[str]) -> int:
        """Runs a child to its end, within `raised`, and returns its code; negative for a signal.

        Raises:
            ComparisonInterrupted: with the child ended, by force after GRACE_S.
        """
        child = None
        self._is_raising = False  # until the child can be ended
        try:
            child = _start(command)
            self._is_raising = True
            self._raise_noted()
            return child.wait()
        finally:
            if child is not None:
                _end(child)


def _start(command: Sequence[str]) -> subprocess.Popen:
    """Starts a child that leaves Ctrl-C, which all of a terminal's group gets, to this process."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
    try:
        return subprocess.Popen(command)
    finally:
        signal.signal(signal.SIGINT, before)


def _end(child: subprocess.Popen) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
