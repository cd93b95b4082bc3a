"""Child processes that score completions under a wall-clock bound.

Each lane is a thread with one child. A child that takes too long is killed, and its completion gets
an error that names the scorer; so does one at which the child dies twice. The child is replaced,
and no other completion is touched. Nothing here depends on signals, so any thread may ask.
"""

import concurrent.futures
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rollout_worker.config import RewardFunctionConfig
from rollout_worker.rewards.reward_process import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    ChildFailed,
    RewardProcess,
)
from rollout_worker.rewards.scorers import resolve_weights, weighted_total

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """One completion to score, and what its scorers may look at."""

    completion: str
    answer: str
    prompt: str
    item: Mapping[str, Any]
    """The record of the source; JSON values only."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The rewards of one completion."""

    rewards: dict[str, float]
    """By scorer name, and `name/variant` for what is only logged. Without those that failed."""
    total: float
    """Weighted sum; NaN where `error` says something."""
    error: str
    """Empty, or which scorer failed and how."""


class _ScorerThread(threading.Thread):
    """One child and the thread that feeds it; the child lives no longer than the thread."""

    def __init__(self, pool: "RewardPool", index: int):
        super().__init__(name=f"reward-lane-{index}", daemon=True)
        self.ready: Future[None] = Future()
        self.child: RewardProcess | None = None
        self._pool = pool

    def run(self) -> None:
        try:
            self._restart()
        except (ValueError, RuntimeError, OSError) as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        for request, future in iter(self._pool.jobs.get, None):
            try:
                future.set_result(self._score(request))
            except BaseException as error:  # whoever waits for this score must hear of it
                future.set_exception(error)
        self.stop()

    def stop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()

    def _restart(self) -> RewardProcess:
        self.stop()
        self.child = child = RewardProcess(self._pool.functions)
        child.wait_ready(self._pool.start_timeout_s)
        return child

    def _score(self, request: ScoreRequest) -> Score:
        """Scores once more where the child died: something else may have killed it, such as a want
        of memory, and a reward must not depend on that.
        """
        score, died = self._attempt(request)
        if died:
            log.warning("a reward child died: %s; the completion is scored once more", score.error)
            score, _ = self._attempt(request)
        return score

    def _attempt(self, request: ScoreRequest) -> tuple[Score, bool]:
        """One score by the child, and whether the child died."""
        if self._pool.closed:
            raise RuntimeError("the reward pool was closed before this completion was scored")
        child = self.child if self.child is not None and self.child.alive else self._restart()
        weights, timeout_s = self._pool.weights, self._pool.timeout_s
        rewards, errors, died = {}, [], False
        deadline_s = time.monotonic() + timeout_s
        names = iter(weights)
        name = next(names)
        try:
            child.send({**vars(request), "item": dict(request.item)}, deadline_s)
            while name is not None:
                message = child.receive(deadline_s)
                if "error" in message:
                    errors.append(f"{name}: {message['error']}")
                rewards |= message.get("rewards", {})
                name = next(names, None)
        except TimeoutError:
            errors.append(f"{name}: no result within {timeout_s:g} s, child killed")
            self.stop()
        except ChildFailed as failure:
            errors.append(f"{name}: {failure}")
            died = True
            self.stop()
        if errors:
            return Score(rewards, math.nan, "; ".join(errors)), died
        return Score(rewards, weighted_total(rewards, weights), ""), False


class PendingScores:
    """Scores that are on their way."""

    def __init__(self, futures: Sequence[Future[Score]], bound_s: float, lanes: Sequence[str]):
        self._futures = futures
        self._bound_s = bound_s
        self._deadline_s = time.monotonic() + bound_s
        self._lanes = lanes

    @property
    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return all(future.done() for future in self._futures)

    def wait_done(self, timeout_s: float | None) -> None:
        """Waits until `wait` would not wait, at most for so long; None takes the scorers' bound."""
        left_s = max(0.0, self._deadline_s - time.monotonic())
        concurrent.futures.wait(
            self._futures, left_s if timeout_s is None else min(timeout_s, left_s)
        )
        if time.monotonic() >= self._deadline_s:
            self.wait()  # says who did not answer

    def wait(self) -> list[Score]:
        """One score per item, in the order of the items.

        Raises:
            TypeError, ValueError: if an item holds something that is no JSON value.
            RuntimeError: if a child that died cannot be replaced, or the pool was closed meanwhile.
        """
        scores = []
        for future in self._futures:
            try:
                scores.append(future.result(timeout=self._deadline_s - time.monotonic()))
            except TimeoutError:
                raise RuntimeError(
                    f"no reward lane answered for {len(self._futures)} completions within "
                    f"{self._bound_s:g} s: {self._lanes}"
                ) from None
        return scores


class RewardPool:
    """Scores completions with a fixed set of functions in a fixed number of processes."""

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        *,
        processes: int,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        """Starts the processes and waits until each has loaded all scorers.

        Args:
            functions: the scorers, in the order in which they run; names differ.
            processes: children, each with its own copy of the scorers' modules.
            timeout_s: bound on all scorers of one completion together.
            start_timeout_s: bound on the start of a child.

        Raises:
            ValueError: if a scorer cannot be loaded.
            RuntimeError: if a child dies at its start or takes too long.
        """
        self.functions = tuple(functions)
        self.weights = resolve_weights(functions)
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.closed = False
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._lanes = [_ScorerThread(self, index) for index in range(processes)]
        for lane in self._lanes:
            lane.start()
        try:
            for lane in self._lanes:
                lane.ready.result(timeout=start_timeout_s + 2 * STOP_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def submit(self, items: Sequence[ScoreRequest]) -> "PendingScores":
        """Has completions scored while the caller goes on; safe from any thread.

        Raises:
            RuntimeError: if the pool is closed.
        """
        if self.closed:
            raise RuntimeError("the reward pool is closed")
        futures: list[Future[Score]] = [Future() for _ in items]
        for request, future in zip(items, futures, strict=True):
            self.jobs.put((request, future))
        # Lanes keep every bound themselves; this one only turns a lost lane into an error.
        waiting = self.jobs.qsize() + len(items) + len(self._lanes)
        per_item_s = self.timeout_s + self.start_timeout_s + 2 * STOP_TIMEOUT_S
        return PendingScores(futures, waiting * per_item_s, [lane.name for lane in self._lanes])

    def close(self) -> None:
        """Ends the lanes and kills the children; safe to call twice."""
        self.closed = True
        for _ in self._lanes:
            self.jobs.put(None)
        for lane in self._lanes:
            lane.join(self.timeout_s + STOP_TIMEOUT_S)
            lane.stop()


def validate_functions(
    functions: Sequence[RewardFunctionConfig], *, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Checks names, imports and parameters of scorers in a child process that then ends.

    Raises:
        ValueError: if a scorer cannot be loaded, with the reason and what to do.
        RuntimeError: if loading it kills the child or takes longer than `timeout_s`.
    """
    child = RewardProcess(functions)
    child.wait_ready(timeout_s)
    child.kill()
