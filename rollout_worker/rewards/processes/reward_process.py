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
from collections.abc import Sequence

import psutil

from rollout_worker.config.reward_config import RewardConfig, RewardFunctionConfig
from rollout_worker.rewards.processes.process_tree import (
    adopt_orphans,
    end_descendants,
    end_orphans_with,
    reap_session,
)
from rollout_worker.rewards.processes.reward_replies import (
    BadReply,
    parse_load_reply,
)
from rollout_worker.rewards.processes.scorer_output import ScorerOutput
from rollout_worker.rewards.scorers import ScorerKind
from services.wire.secret_text import scorer_environment

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Bound on the start of a child, which imports the scorers' modules."""
SLOW_START_S = 5.0
"""A start that takes longer logs what it waits for."""
STOP_TIMEOUT_S = 5.0
"""Bound on the end of a child that was killed."""
SCORERS = "rollout_worker.rewards.processes.reward_child"
"""The program of a child that runs scorers."""
_MAX_REPLY_BYTES = 1 << 20
_MAX_BYTES_OF_COMPLETION = 1 << 17  # of its rewards: 64 names of 100 characters, and numbers
_ROOT = pathlib.Path(__file__).resolve().parents[3]


class ChildFailed(Exception):
    """A child died, or broke the protocol."""


def new_id() -> str:
    """An id of a message, unknown to what scorers write into the pipe by accident."""
    return secrets.token_hex(8)


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
        module: str = SCORERS,
    ):
        """Starts the process; `wait_ready` completes it. The process dies with this thread.

        Args:
            functions: the scorers.
            allowance: what the process gets.
            output: shows what it prints, for several children together.
            module: the program that the process runs.
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
        self.kinds: dict[str, ScorerKind] = {}
        """Of the scorers, by name; known once it is ready."""
        self._killed = False
        self._loads, self._takes = "reward function", "the import of its module"
        if module != SCORERS:
            self._loads = "environment"
            self._takes += ", and one that is made for its tools and closed,"
        self._name = f"{self._loads.partition(' ')[0]} process"
        self._names = {function.name for function in functions}
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
            request_id = new_id()
            self.send(self._setup, request_id, deadline_s)
            while True:
                if notice_s < deadline_s and not self._has_reply_by(notice_s):
                    log.warning("%s: still %s; killed after %g s in all", self._name, at, timeout_s)
                    notice_s = math.inf
                reply = parse_load_reply(self.read_line(deadline_s), request_id)
                if reply.kind == "ready" and set(reply.kinds) != self._names:
                    raise ChildFailed(f"child has loaded {list(reply.kinds)}")
                if reply.kind == "ready":
                    self.kinds = reply.kinds
                    return
                if reply.kind == "refused":
                    raise ValueError(reply.text)
                at = f"loading {self._loads} {reply.text!r}"
        except TimeoutError:
            self.kill()
            raise RuntimeError(
                f"{self._name}: not ready within {timeout_s:g} s, killed while {at}: {self._takes} "
                "must end"
            ) from None
        except BadReply as error:
            self.kill()
            raise RuntimeError(f"{self._name}: child sent {error} while {at}") from error
        except ChildFailed as failure:
            self.kill()
            raise RuntimeError(f"{self._name}: {failure} while {at}") from failure
        except ValueError:
            self.kill()
            raise

    def send(self, message: dict, request_id: str, deadline_s: float) -> None:
        """Writes one message.

        Args:
            message: JSON values.
            request_id: of `new_id`; every line that answers the message carries it.
            deadline_s: monotonic seconds.

        Raises:
            TimeoutError: if the child does not read it before the deadline.
            ChildFailed: if the child has ended.
            TypeError, ValueError: if the message holds what is no JSON value; nothing is written.
        """
        text = json.dumps({**message, "id": request_id}, allow_nan=False)
        data = memoryview(text.encode() + b"\n")
        while data:
            self._wait(self._input_fd, select.POLLOUT, deadline_s)
            try:
                data = data[os.write(self._input_fd, data[:65536]) :]
            except BrokenPipeError:
                raise ChildFailed(self._describe_end()) from None

    def read_line(self, deadline_s: float, completions: int = 1) -> bytes:
        """Reads one line that the child has written.

        Args:
            deadline_s: monotonic seconds; what is there already is read after it, too.
            completions: the most of a request in flight, which bounds the length of the line.

        Raises:
            TimeoutError: if no line is complete before the deadline.
            ChildFailed: if the child has ended.
        """
        most_bytes = _MAX_REPLY_BYTES + completions * _MAX_BYTES_OF_COMPLETION
        while b"\n" not in self._received:
            self._wait(self._output_fd, select.POLLIN, deadline_s)
            chunk = os.read(self._output_fd, 65536)
            if not chunk:
                raise ChildFailed(self._describe_end())
            self._received += chunk
            if len(self._received) > most_bytes:
                raise ChildFailed(f"child sent a reply of over {most_bytes} bytes")
        line, _, self._received = self._received.partition(b"\n")
        return line

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
        end_orphans_with(_MARK, self._mark, STOP_TIMEOUT_S)
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
        left_s = max(0.0, deadline_s - time.monotonic())
        if not poll.poll(math.ceil(left_s * 1000)):
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
