"""The pool's end of one child process that runs scorers (`reward_child.py` is the other)."""

import dataclasses
import json
import logging
import math
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psutil

from rollout_worker.config import RewardConfig, RewardFunctionConfig
from rollout_worker.rewards.process_tree import (
    adopt_orphans,
    end_descendants,
    end_processes,
    orphans_with,
    reap_session,
)
from rollout_worker.rewards.reward_replies import (
    BadReply,
    ScoreReply,
    parse_load_reply,
    parse_score_reply,
)
from rollout_worker.rewards.scorer_output import ScorerOutput
from services.wire.secret_text import scorer_environment

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""Bound on the start of a child, which imports the scorers' modules."""
SLOW_START_S = 5.0
"""A start that takes longer logs what it waits for."""
STOP_TIMEOUT_S = 5.0
"""Bound on the end of a child that was killed."""
_MAX_REPLY_BYTES = 1 << 20
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class ChildFailed(Exception):
    """A child died, or broke the protocol."""


_MARK = "TANDEM_SCORERS"
"""Variable by which a process is known as started by the scorers of one child."""
_MOST_MEMORY_GB = 16.0
_HOST_SHARE = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allowance:
    """What one child process with scorers, which are foreign code, gets of this host."""

    memory_gb: float | None = None
    """GiB; None takes a quarter of the host's memory, at most 16."""
    environment: tuple[str, ...] = ()
    """Names of variables that it gets beside the usual ones."""

    @classmethod
    def of(cls, config: RewardConfig) -> "Allowance":
        """As configured."""
        return cls(memory_gb=config.memory_gb, environment=config.environment)

    @property
    def memory_bytes(self) -> int:
        """The bound on its memory."""
        if self.memory_gb is not None:
            return int(self.memory_gb * 2**30)
        host = psutil.virtual_memory().total
        return int(min(_MOST_MEMORY_GB * 2**30, _HOST_SHARE * host))


USUAL = Allowance()
"""Where nothing else is configured."""


class RewardProcess:
    """Owns one child process and its pipes."""

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        allowance: Allowance = USUAL,
        output: ScorerOutput | None = None,
    ):
        """Starts the process; `wait_ready` completes it. The process dies with this thread.

        Args:
            functions: the scorers.
            allowance: what the process gets.
            output: shows what it prints, for several children together.
        """
        # The child finds this package from any working directory. Scorers' modules are found on the
        # import path of this process, or in the working directory.
        environment = scorer_environment(os.environ, allowance.environment)
        # A scorer that uses JAX must not take the devices of its worker.
        environment.setdefault("JAX_PLATFORMS", "cpu")
        environment[_MARK] = self._mark = secrets.token_hex(8)
        paths = [str(_ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        adopt_orphans()
        module = "rollout_worker.rewards.reward_child"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), str(allowance.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._shown = (output or ScorerOutput()).follow(self._process.stderr)
        self._input_fd = self._process.stdin.fileno()
        self._output_fd = self._process.stdout.fileno()
        os.set_blocking(self._input_fd, False)
        os.set_blocking(self._output_fd, False)
        self._received = b""
        self._request_id = ""
        """Of the last message in; unknown to what scorers write into the pipe by accident."""
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
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
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
                    log.warning("reward process: still %s; killed after %g s in all", at, timeout_s)
                    notice_s = math.inf
                reply = self._receive(deadline_s, parse_load_reply)
                if reply.kind == "ready":
                    return
                if reply.kind == "refused":
                    raise ValueError(reply.text)
                at = f"loading reward function {reply.text!r}"
        except TimeoutError:
            self.kill()
            raise RuntimeError(
                f"reward process: not ready within {timeout_s:g} s, killed while {at}: the import "
                "of its module must end"
            ) from None
        except ChildFailed as failure:
            self.kill()
            raise RuntimeError(f"reward process: {failure} while {at}") from failure
        except ValueError:
            self.kill()
            raise

    def send(self, message: dict, deadline_s: float) -> None:
        """Writes one message, with an id of its own.

        Raises:
            TimeoutError: if the child does not read it before the deadline (monotonic seconds).
            ChildFailed: if the child has ended.
        """
        self._request_id = secrets.token_hex(8)
        text = json.dumps({**message, "id": self._request_id}, allow_nan=False)
        data = memoryview(text.encode() + b"\n")
        while data:
            self._wait(self._input_fd, select.POLLOUT, deadline_s)
            try:
                data = data[os.write(self._input_fd, data[:65536]) :]
            except BrokenPipeError:
                raise ChildFailed(self._describe_end()) from None

    def receive_score(self, scorer: str, deadline_s: float) -> ScoreReply:
        """Reads what one scorer made of the completion that was sent last.

        Raises:
            TimeoutError: if no reply is complete before the deadline (monotonic seconds).
            ChildFailed: if the child has ended, or sent anything else.
        """
        return self._receive(
            deadline_s, lambda line, request_id: parse_score_reply(line, request_id, scorer)
        )

    def _receive(self, deadline_s: float, parse: Callable[[bytes, str], T]) -> T:
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
            return parse(line, self._request_id)
        except BadReply as error:
            raise ChildFailed(f"child sent {error}") from None

    def kill(self) -> None:
        """Kills the child with the processes it started, and closes the pipes; safe to repeat."""
        if self._killed:
            return
        self._killed = True
        self._process.terminate()  # it ends all below it first
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a scorer has stopped it
            end_descendants(self.pid)
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        # Left over only where a scorer has killed the process that would have ended them.
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (strays := orphans_with(_MARK, self._mark)) and time.monotonic() < deadline:
            end_processes(strays)
            psutil.wait_procs(strays, STOP_TIMEOUT_S)
        reap_session(self._process.pid)
        self._shown.join(STOP_TIMEOUT_S)
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
