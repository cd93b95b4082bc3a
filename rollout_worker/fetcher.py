"""Has the next policy version at hand before it is needed.

A thread asks for a version newer than the newest it has, waits on the server until there is one,
and pulls it while the device decodes. That a server cannot be reached is no failure of the worker:
the thread asks again, and whoever waits for a version in vain hears the last reason.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from services.process.background import Background
from services.weights.replica import PullStats
from services.weights.transfer import WeightTransferError
from services.wire.messages import WeightManifest

ASK_S = 15.0
"""Longest question for a version that does not exist yet."""
PAUSE_S = 0.25
"""After a transfer that failed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Fetched:
    """A version in host memory, verified; or, beside the learner, on its devices."""

    manifest: WeightManifest
    named: Mapping[str, np.ndarray | jax.Array]
    stats: PullStats
    """How it came, for metrics and dashboard."""


Pull = Callable[[int, Sequence[str], float], Fetched]
"""Version wanted at least, addresses in order of preference, seconds to wait for it to exist."""


class Fetcher:
    """Owns the thread that pulls versions."""

    def __init__(self, pull: Pull, sources: Sequence[str], on_change: Callable[[], None]):
        """Args:
        pull: blocks until the version is there.
        on_change: called in the thread after a version came or the thread failed.
        """
        self._pull = pull
        self._sources = tuple(sources)
        self._on_change = on_change
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._newest = -1
        self._ready: Fetched | None = None
        self._records: list[PullStats] = []
        self._seconds = 0.0
        self._last_error = "no answer yet"
        self._thread = Background("weight-fetcher", self._run, on_change)

    @property
    def ready(self) -> Fetched | None:
        """The newest version that is here and was not taken."""
        self._thread.check()
        with self._lock:
            return self._ready

    def take(self) -> Fetched | None:
        """`ready`, handed over."""
        self._thread.check()
        with self._lock:
            ready, self._ready = self._ready, None
            return ready

    @property
    def story(self) -> str:
        """Who is asked for weights, and what came of it last, for an error."""
        with self._lock:
            return f"{', then '.join(self._sources)} asked, {self._last_error}"

    def use(self, sources: Sequence[str]) -> None:
        """Asks elsewhere from the next question on."""
        with self._lock:
            self._sources = tuple(sources)

    def forget(self) -> None:
        """Takes no version for known any more, so that the current one is pulled again."""
        with self._lock:
            self._newest, self._ready = -1, None

    def take_records(self) -> tuple[list[PullStats], float]:
        """One record for every version pulled since the last call, and the seconds it all took."""
        with self._lock:
            records, seconds = self._records, self._seconds
            self._records, self._seconds = [], 0.0
            return records, seconds

    def close(self) -> None:
        """Lets the thread end after its current question."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                wanted, sources = self._newest + 1, self._sources
            try:
                fetched = self._pull(wanted, sources, ASK_S)
            except (TimeoutError, WeightTransferError) as error:
                self._last_error = str(error)
                self._closed.wait(PAUSE_S)
                continue
            with self._lock:
                if fetched.manifest.policy_version < self._newest + 1:
                    continue  # `forget` came meanwhile
                self._newest = fetched.manifest.policy_version
                self._ready = fetched
                self._records.append(fetched.stats)
                self._seconds += fetched.stats.seconds
            self._on_change()


class Patience:
    """How long someone has waited for one thing, in one or many looks."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._since: float | None = None

    def waited(self) -> bool:
        """Notes that the wait goes on; whether it has gone on for too long."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since > self._timeout_s

    def over(self) -> None:
        """What was waited for has come."""
        self._since = None
