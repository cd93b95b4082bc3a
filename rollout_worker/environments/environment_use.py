"""Where the time of episodes goes: calls of environments, and how many episodes are in flight.

A worker counts it, reports it with its news, and the driver makes metrics of a step of it.
"""

import dataclasses
import threading
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentUse:
    """Of the environments of one worker, or of several, over some time."""

    calls: int = 0
    """That have ended."""
    call_s: float = 0.0
    """Of these together: from what the model said until the answer, waits for a process too."""
    longest_call_s: float = 0.0
    episode_s: float = 0.0
    """Of all episodes together."""

    def __add__(self, other: "EnvironmentUse") -> "EnvironmentUse":
        return EnvironmentUse(
            calls=self.calls + other.calls,
            call_s=self.call_s + other.call_s,
            longest_call_s=max(self.longest_call_s, other.longest_call_s),
            episode_s=self.episode_s + other.episode_s,
        )

    def metrics(self, wall_s: float) -> dict[str, float]:
        """As `environment/*`; none where no call has ended.

        Args:
            wall_s: in which all of it happened.
        """
        if not self.calls:
            return {}
        return {
            "environment/calls": float(self.calls),
            "environment/call_s_mean": self.call_s / self.calls,
            "environment/call_s_max": self.longest_call_s,
            "environment/episodes_mean": self.episode_s / wall_s,
        }


NO_USE = EnvironmentUse()


class UseMeter:
    """Counts for one pool of environments; for any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._lock = threading.Lock()
        self._use = EnvironmentUse()
        self._episodes = 0
        self._since_s = now()

    def begin_call(self) -> Callable[[object], None]:
        """Times a call, which ends when the result is called, with anything."""
        began_s = self._now()

        def end(_: object) -> None:
            seconds = self._now() - began_s
            with self._lock:
                self._use += EnvironmentUse(calls=1, call_s=seconds, longest_call_s=seconds)

        return end

    def count_episodes(self, more: int) -> None:
        """So many episodes more are in flight; -1 where one has ended."""
        with self._lock:
            self._charge()
            self._episodes += more

    def take_use(self) -> EnvironmentUse:
        """What was counted since the last call."""
        with self._lock:
            self._charge()
            use, self._use = self._use, EnvironmentUse()
            return use

    def _charge(self) -> None:
        now = self._now()
        self._use += EnvironmentUse(episode_s=self._episodes * (now - self._since_s))
        self._since_s = now
