"""Fetches the next policy version before it is needed.

A thread asks for a version newer than the newest it has, waits at the server until there is one,
and pulls it while the device decodes. A server that cannot be reached is no failure of the worker:
the thread asks again, and the error of a wait that is too long gives the last reason.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from services.process.background import Background
from services.weights.replica import PullStats, Replica
from services.weights.transfer import WeightTransferError
from services.wire.messages import NO_VERSION, WeightManifest

ASK_S = 15.0
"""Longest wait of one call for a version that does not exist yet."""
PAUSE_S = 0.25
"""After a transfer that failed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Fetched:
    """A version in host memory, verified; or, beside the learner, on its devices."""

    manifest: WeightManifest
    named: Mapping[str, np.ndarray | jax.Array]
    stats: PullStats
    """Of the transfer, for metrics and dashboard."""


Pull = Callable[[int, Sequence[str], float], Fetched]
"""Version wanted at least, addresses in order of preference, seconds to wait for it to exist."""

WaitForShared = Callable[[int, float], tuple[WeightManifest, Mapping[str, jax.Array]]]
"""Version wanted at least and seconds to wait for it -> its manifest and arrays of this process;
raises TimeoutError."""


def pull_into(replica: Replica, timeout_s: float) -> Pull:
    """Pulls versions over the network; the replica then serves them to other workers.

    Args:
        timeout_s: bound of one transfer.
    """

    def pull(min_version: int, sources: Sequence[str], wait_s: float) -> Fetched:
        pulled = replica.pull(min_version, sources, wait_s, transfer_timeout_s=timeout_s)
        return Fetched(pulled.manifest, pulled.tensors, pulled.stats)

    return pull


def pull_shared(wait_for: WaitForShared) -> Pull:
    """Takes versions over from the learner in this process; nothing is transferred."""

    def pull(min_version: int, sources: Sequence[str], wait_s: float) -> Fetched:
        manifest, tensors = wait_for(min_version, wait_s)
        stats = PullStats(
            policy_version=manifest.policy_version,
            version_bytes=manifest.nbytes,
            wire_bytes=0,
            delta=False,
            wait_s=0.0,
            seconds=0.0,
            sources=(),
            depth=0,
            failures=(),
        )
        return Fetched(manifest, tensors, stats)

    return pull


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
        self._keep = NO_VERSION
        self._kept: Fetched | None = None
        """The version of `keep_version`, where a newer one came before it was taken."""
        self._records: list[PullStats] = []
        self._seconds = 0.0
        self._last_error = "no answer yet"
        self._thread = Background("weight-fetcher", self._run, on_change)

    @property
    def ready(self) -> Fetched | None:
        """The newest version that was fetched and not yet taken; before it, the one to be kept."""
        self._thread.raise_failure()
        with self._lock:
            return self._kept or self._ready

    def take_version(self) -> Fetched | None:
        """Takes `ready` away and returns it."""
        self._thread.raise_failure()
        with self._lock:
            if self._kept is not None:
                taken, self._kept = self._kept, None
            else:
                taken, self._ready = self._ready, None
            return taken

    def keep_version(self, version: int) -> None:
        """Has this version, once it is fetched, taken before any newer one; NO_VERSION for none."""
        with self._lock:
            self._keep, self._kept = version, None

    @property
    def last_attempt(self) -> str:
        """Which addresses are asked for weights and the result of the last call, for an error."""
        with self._lock:
            return f"{', then '.join(self._sources)} asked, {self._last_error}"

    def use_sources(self, sources: Sequence[str]) -> None:
        """Asks other addresses, preferred first, from the next call on."""
        with self._lock:
            self._sources = tuple(sources)

    def forget_versions(self) -> None:
        """Counts no version as fetched any more, so that the current one is pulled again."""
        with self._lock:
            self._newest, self._ready, self._kept = -1, None, None

    def take_records(self) -> tuple[list[PullStats], float]:
        """One record for every version pulled since the last call, and the seconds it all took."""
        with self._lock:
            records, seconds = self._records, self._seconds
            self._records, self._seconds = [], 0.0
            return records, seconds

    def close(self) -> None:
        """Lets the thread end after its current call."""
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
                    continue  # `forget_versions` was called meanwhile
                self._newest = fetched.manifest.policy_version
                if self._ready and self._ready.manifest.policy_version == self._keep:
                    self._kept = self._ready
                self._ready = fetched
                self._records.append(fetched.stats)
                self._seconds += fetched.stats.seconds
            self._on_change()
