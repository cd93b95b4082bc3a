"""Child processes that score completions under a wall-clock bound.

Each child is fed by a thread of its own. A child that takes too long is killed, and its completion
gets an error that names the scorer; so does a completion at which the child dies twice. The child
is replaced, and no other completion is affected. Nothing here depends on signals, so the pool may
be used from any thread.
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
    USUAL,
    Allowance,
    ChildFailed,
    RewardProcess,
)
from rollout_worker.rewards.scorer_output import ScorerOutput
from rollout_worker.rewards.scorers import MOST_VARIANTS, resolve_weights, weighted_total

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """One completion to score, with the prompt's data for its scorers."""

    completion: str
    answer: str
    prompt: str
    item: Mapping[str, Any]
    """The record of the source; JSON values only."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The rewards of one completion."""

    rewards: dict[str, float]
    """By scorer name, and by `name/variant` for values that are only logged. Scorers that failed
    are left out."""
    total: float
    """Weighted sum; NaN if `error` is not empty."""
    error: str
    """Empty, or which scorer failed and how."""


class _ScorerThread(threading.Thread):
    """The thread that feeds one child; the child ends with it."""

    def __init__(self, pool: "RewardPool", index: int):
        super().__init__(name=f"scorer-{index}", daemon=True)
        self.ready: Future[None] = Future()
        self.child: RewardProcess | None = None
        self.scored = 0
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
            except BaseException as error:  # raised in the thread that waits for this score
                future.set_exception(error)
            self.scored += 1
        self.kill_child()

    def kill_child(self) -> None:
        """Kills the child, if there is one."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()

    def _restart(self) -> RewardProcess:
        self.kill_child()
        self.child = child = RewardProcess(
            self._pool.functions, self._pool.allowance, self._pool.output
        )
        child.wait_ready(self._pool.start_timeout_s)
        return child

    def _score(self, request: ScoreRequest) -> Score:
        """Scores a second time if the child died: the cause may be outside, such as a lack of
        memory, and a reward must not depend on that.
        """
        score, died = self._attempt(request)
        if died:
            log.warning("a reward process died: %s; the completion is scored again", score.error)
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
        name = next(iter(weights))
        try:
            child.send({**vars(request), "item": dict(request.item)}, deadline_s)
            for name in weights:
                reply = child.receive_score(name, deadline_s)
                if reply.error:
                    errors.append(f"{name}: {reply.error}")
                rewards |= self._pool.known_names(reply.rewards)
        except TimeoutError:
            errors.append(f"{name}: no result within {timeout_s:g} s, child killed")
            self.kill_child()
        except ChildFailed as failure:
            errors.append(f"{name}: {failure}")
            died = True
            self.kill_child()
        if errors:
            return Score(rewards, math.nan, "; ".join(errors)), died
        return Score(rewards, weighted_total(rewards, weights), ""), False


class PendingScores:
    """Scores of several completions, which become ready in the background."""

    def __init__(self, futures: Sequence[Future[Score]], bound_s: float, threads: Sequence[str]):
        self._futures = futures
        self._bound_s = bound_s
        self._deadline_s = time.monotonic() + bound_s
        self._threads = threads

    @property
    def done(self) -> bool:
        """Whether all scores are ready."""
        return all(future.done() for future in self._futures)

    def wait_done(self, timeout_s: float | None) -> None:
        """Waits until all scores are ready, at most `timeout_s`; None takes the scorers' bound."""
        left_s = max(0.0, self._deadline_s - time.monotonic())
        concurrent.futures.wait(
            self._futures, left_s if timeout_s is None else min(timeout_s, left_s)
        )
        if time.monotonic() >= self._deadline_s:
            self.wait()  # raises an error that names the threads

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
                    f"no scorer thread answered for {len(self._futures)} completions within "
                    f"{self._bound_s:g} s: {self._threads}"
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
        allowance: Allowance = USUAL,
    ):
        """Starts the processes and waits until each has loaded all scorers.

        Args:
            functions: the scorers, in the order in which they run; names differ.
            processes: children, each with its own copy of the scorers' modules.
            timeout_s: bound on all scorers of one completion together.
            start_timeout_s: bound on the start of a child.
            allowance: what each child gets.

        Raises:
            ValueError: if a scorer cannot be loaded.
            RuntimeError: if a child dies at its start or takes too long.
        """
        self.functions = tuple(functions)
        self.weights = resolve_weights(functions)
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.allowance = allowance
        self.output = ScorerOutput()
        self._names: dict[str, set[str]] = {}
        """Of the values that each scorer has returned."""
        self._names_lock = threading.Lock()
        self._said_names = False
        self.closed = False
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [_ScorerThread(self, index) for index in range(processes)]
        for thread in self._threads:
            thread.start()
        try:
            for thread in self._threads:
                thread.ready.result(timeout=start_timeout_s + 2 * STOP_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def scored(self) -> int:
        """Completions whose scoring has ended, since the start."""
        return sum(thread.scored for thread in self._threads)

    def known_names(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """The rewards without variants beyond MOST_VARIANTS names of the whole life of this pool.

        Each name is a metric for good; variants count for nothing, so that leaving some out
        changes no training.
        """
        kept = {}
        with self._names_lock:
            for name, value in rewards.items():
                names = self._names.setdefault(name.partition("/")[0], set())
                if name in self.weights or name in names or len(names) < MOST_VARIANTS:
                    names.add(name)
                    kept[name] = value
                elif not self._said_names:
                    self._said_names = True
                    log.warning(
                        "a scorer has returned values under more than %d names: %r and later ones "
                        "are left out; give the values of all completions the same names",
                        MOST_VARIANTS,
                        name,
                    )
        return kept

    def submit(self, items: Sequence[ScoreRequest]) -> "PendingScores":
        """Starts to score completions and returns at once; safe from any thread.

        Raises:
            RuntimeError: if the pool is closed.
        """
        if self.closed:
            raise RuntimeError("the reward pool is closed")
        futures: list[Future[Score]] = [Future() for _ in items]
        for request, future in zip(items, futures, strict=True):
            self.jobs.put((request, future))
        # The threads enforce the bounds themselves; this one turns a lost thread into an error.
        waiting = self.jobs.qsize() + len(items) + len(self._threads)
        per_item_s = self.timeout_s + self.start_timeout_s + 2 * STOP_TIMEOUT_S
        return PendingScores(
            futures, waiting * per_item_s, [thread.name for thread in self._threads]
        )

    def close(self) -> None:
        """Ends the threads and kills the children; safe to call twice."""
        self.closed = True
        for _ in self._threads:
            self.jobs.put(None)
        for thread in self._threads:
            thread.join(self.timeout_s + STOP_TIMEOUT_S)
            thread.kill_child()


def validate_functions(
    functions: Sequence[RewardFunctionConfig],
    *,
    timeout_s: float = START_TIMEOUT_S,
    allowance: Allowance = USUAL,
) -> None:
    """Checks names, imports and parameters of scorers in a child process that then ends.

    Raises:
        ValueError: if a scorer cannot be loaded, with the reason and what to do.
        RuntimeError: if loading it kills the child or takes longer than `timeout_s`.
    """
    child = RewardProcess(functions, allowance)
    child.wait_ready(timeout_s)
    child.kill()
