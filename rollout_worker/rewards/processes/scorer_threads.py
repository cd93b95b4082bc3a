"""The threads of a pool, each of which feeds a child process of its own."""

import threading
from collections.abc import Callable, Sequence

from rollout_worker.rewards.processes.reward_process import STOP_TIMEOUT_S, RewardProcess
from rollout_worker.rewards.processes.scorer_thread import STANDSTILL_S, JobQueue, ScorerThread
from rollout_worker.rewards.scorers import ScorerKind
from rollout_worker.rewards.spending import SpendingAccount


class ScorerThreads:
    """Starts threads with their children, has them serve, and ends all of them."""

    def __init__(
        self,
        name: str,
        start_child: Callable[[], RewardProcess],
        *,
        timeout_s: float,
        start_timeout_s: float,
        account: SpendingAccount,
    ):
        """Args:
        name: of the threads, which are numbered.
        start_child: returns a child that need not be ready; called in any of the threads.
        timeout_s: bound on one job.
        start_timeout_s: bound on the start of a child.
        account: as `ScorerThread` has it.
        """
        self._name = name
        self._start_child = start_child
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._account = account
        self._closed = threading.Event()
        self._threads: list[ScorerThread] = []
        self.lanes: list[JobQueue] = []
        """What each thread serves; one that serves nothing yet is not there."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    @property
    def scored(self) -> int:
        """Completions whose scoring has ended, since the start; once for each of their jobs."""
        return sum(thread.scored for thread in self._threads)

    @property
    def names(self) -> list[str]:
        """Of the threads."""
        return [thread.name for thread in self._threads]

    def start(self, count: int) -> tuple[list[ScorerThread], dict[str, ScorerKind]]:
        """Starts threads with a ready child each; returns the kinds of the scorers as well.

        Raises:
            ValueError: if a scorer cannot be loaded.
            RuntimeError: if a child dies at its start or takes too long.
        """
        threads = [
            ScorerThread(
                f"{self._name}-{len(self._threads) + index}",
                start_child=self._start_ready,
                timeout_s=self._timeout_s,
                closed=self._closed,
                account=self._account,
            )
            for index in range(count)
        ]
        self._threads += threads
        for thread in threads:
            thread.start()
        bound_s = self._start_timeout_s + 2 * STOP_TIMEOUT_S
        kinds = [thread.ready.result(timeout=bound_s) for thread in threads]
        return threads, kinds[0]

    def serve(self, threads: Sequence[ScorerThread], lane: JobQueue) -> None:
        """Says whose jobs these threads take, once."""
        self.lanes += [lane] * len(threads)
        for thread in threads:
            thread.serve(lane)

    def close(self) -> None:
        """Ends the threads and kills the children; safe to call twice."""
        self._closed.set()
        for lane in self.lanes:
            lane.jobs.put(None)
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(self._timeout_s + STANDSTILL_S + STOP_TIMEOUT_S)
            thread.kill_child()

    def _start_ready(self) -> RewardProcess:
        child = self._start_child()
        child.wait_ready(self._start_timeout_s)
        return child
