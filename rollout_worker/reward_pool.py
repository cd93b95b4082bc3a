"""Child processes that score completions under a wall-clock bound.

Each lane is a thread with one child. A child that takes too long is killed, and one that dies is
noticed; either way that completion gets an error that names the scorer, the child is replaced, and
no other completion is touched. Nothing here depends on signals, so any thread may ask for scores.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rollout_worker.config import RewardFunctionConfig
from rollout_worker.rewards import resolve_weights, weighted_total

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Bound on the start of a child, which imports the scorers' modules."""
SLOW_START_S = 5.0
"""After which a start that goes on says what it waits for."""
_STOP_TIMEOUT_S = 5.0
_MAX_REPLY_BYTES = 1 << 20
_ROOT = pathlib.Path(__file__).resolve().parents[1]


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


class ChildFailed(Exception):
    """A child died, or broke the protocol."""


_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIALS)", re.I)
"""Names of environment variables that foreign scorers have no business with."""


class RewardChild:
    """Owns one child process and its two pipes."""

    def __init__(self, functions: Sequence[RewardFunctionConfig]):
        """Starts the process; `wait_ready` completes it. The process dies with this thread."""
        # The child must find this package whatever its working directory is; the scorers find
        # their modules where this process would, or in the working directory.
        environment = {k: v for k, v in os.environ.items() if not _SECRET.search(k)}
        paths = [str(_ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout_worker.reward_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, and one signal kills what it forks
        )
        assert self._process.stdin and self._process.stdout
        self._input_fd = self._process.stdin.fileno()
        self._output_fd = self._process.stdout.fileno()
        os.set_blocking(self._input_fd, False)
        os.set_blocking(self._output_fd, False)
        self._received = b""
        self._killed = False
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._setup = {
            "path": path if {"", os.getcwd()} & set(path) else [*path, os.getcwd()],
            "functions": [
                function.model_dump(include={"name", "params"}) for function in functions
            ],
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until every scorer is loaded; kills the child where that fails.

        Raises:
            ValueError: if a scorer cannot be loaded, with the reason and what to do.
            RuntimeError: if the child dies or is not ready in time, naming the scorer.
        """
        deadline_s = time.monotonic() + timeout_s
        notice_s = time.monotonic() + SLOW_START_S
        at = "starting Python"
        try:
            self.send(self._setup, deadline_s)
            while True:
                if notice_s < deadline_s and not self._has_reply_by(notice_s):
                    log.warning("reward child: still %s, killed after %g s in all", at, timeout_s)
                    notice_s = math.inf
                message = self.receive(deadline_s)
                if "loading" in message:
                    at = f"loading reward function {message['loading']!r}"
                elif "refused" in message:
                    raise ValueError(message["refused"])
                else:
                    return
        except TimeoutError:
            self.kill()
            raise RuntimeError(
                f"reward child: not ready within {timeout_s:g} s, killed while {at}: importing "
                "its module must end"
            ) from None
        except ChildFailed as failure:
            self.kill()
            raise RuntimeError(f"reward child: {failure} while {at}") from failure
        except ValueError:
            self.kill()
            raise

    def send(self, message: dict, deadline_s: float) -> None:
        """Writes one message.

        Raises:
            TimeoutError: if the child does not take it before the deadline (monotonic seconds).
            ChildFailed: if the child is gone.
        """
        data = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
        while data:
            self._wait(self._input_fd, select.POLLOUT, deadline_s)
            try:
                data = data[os.write(self._input_fd, data[:65536]) :]
            except BrokenPipeError:
                raise ChildFailed(self._describe_end()) from None

    def receive(self, deadline_s: float) -> dict:
        """Reads one message.

        Raises:
            TimeoutError: if none is complete before the deadline (monotonic seconds).
            ChildFailed: if the child is gone or sent something else than a message.
        """
        while b"\n" not in self._received:
            self._wait(self._output_fd, select.POLLIN, deadline_s)
            chunk = os.read(self._output_fd, 65536)
            if not chunk:
                raise ChildFailed(self._describe_end())
            self._received += chunk
            if len(self._received) > _MAX_REPLY_BYTES:
                raise ChildFailed(f"child sent a reply of over {_MAX_REPLY_BYTES} bytes")
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise ChildFailed(f"child sent {line[:80]!r}, which is no message") from None

    def kill(self) -> None:
        """Kills the child with the processes it started, and closes the pipes; only once."""
        if self._killed:
            return
        self._killed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it is gone already
        self._process.wait(_STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()

    def _has_reply_by(self, moment_s: float) -> bool:
        try:
            if b"\n" not in self._received:
                self._wait(self._output_fd, select.POLLIN, moment_s)
        except TimeoutError:
            return False
        return True

    def _wait(self, fd: int, event: int, deadline_s: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(math.ceil(left_s * 1000)):
            raise TimeoutError

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "child closed its pipe"
        if code >= 0:
            return f"child exited with code {code}"
        try:
            return f"child was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"child was killed by signal {-code}"


class _Lane(threading.Thread):
    """One child and the thread that feeds it; the child lives no longer than the thread."""

    def __init__(self, pool: "RewardPool", index: int):
        super().__init__(name=f"reward-lane-{index}", daemon=True)
        self.ready: Future[None] = Future()
        self.child: RewardChild | None = None
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

    def _restart(self) -> RewardChild:
        self.stop()
        self.child = child = RewardChild(self._pool.functions)
        child.wait_ready(self._pool.start_timeout_s)
        return child

    def _score(self, request: ScoreRequest) -> Score:
        if self._pool.closed:
            raise RuntimeError("the reward pool was closed before this completion was scored")
        child = self.child if self.child is not None and self.child.alive else self._restart()
        weights, timeout_s = self._pool.weights, self._pool.timeout_s
        rewards, errors = {}, []
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
            self.stop()
        if errors:
            return Score(rewards, math.nan, "; ".join(errors))
        return Score(rewards, weighted_total(rewards, weights), "")


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
        self._lanes = [_Lane(self, index) for index in range(processes)]
        for lane in self._lanes:
            lane.start()
        try:
            for lane in self._lanes:
                lane.ready.result(timeout=start_timeout_s + 2 * _STOP_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[ScoreRequest]) -> list[Score]:
        """Scores completions and waits for them; safe from any thread, also from several at once.

        Returns and raises as `submit` and `PendingScores.wait` do.
        """
        return self.submit(items).wait()

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
        per_item_s = self.timeout_s + self.start_timeout_s + 2 * _STOP_TIMEOUT_S
        return PendingScores(futures, waiting * per_item_s, [lane.name for lane in self._lanes])

    def close(self) -> None:
        """Ends the lanes and kills the children; safe to call twice."""
        self.closed = True
        for _ in self._lanes:
            self.jobs.put(None)
        for lane in self._lanes:
            lane.join(self.timeout_s + _STOP_TIMEOUT_S)
            lane.stop()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def validate_functions(
    functions: Sequence[RewardFunctionConfig], *, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Checks names, imports and parameters of scorers in a child process that then ends.

    Raises:
        ValueError: if a scorer cannot be loaded, with the reason and what to do.
        RuntimeError: if loading it kills the child or takes longer than `timeout_s`.
    """
    child = RewardChild(functions)
    child.wait_ready(timeout_s)
    child.kill()
