"""The process that runs scorers: `python -m rollout_worker.rewards.reward_child PARENT_PID BYTES`.

Speaks lines of JSON with `reward_process.py` over the pipes that it was started with; every line
out has the `id` of the line in that it answers. The first line in says which scorers to load; the
answer is `{"loading": name}` before each and then `{"ready": true}` or `{"refused": message}`.
Every later line in is one completion; the answer is one line per scorer, `{"scorer": name}` with
either `{"rewards": {...}}` or `{"error": message}`.

Scorers are foreign code. What they print goes to stderr, what they raise becomes an error message
to the parent, and the parent kills this process when they take too long. A process that they fork
runs on as they wrote it, but has no part in the protocol. All of them have at most BYTES of memory
each, and end with this process, whatever session they are in.
"""

import contextlib
import json
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NoReturn

from rollout_worker.rewards.process_tree import (
    END_S,
    adopt_orphans,
    end_descendants,
    signal_with_parent,
)
from rollout_worker.rewards.scorers import (
    BadScorer,
    Scorer,
    check_scorer_params,
    named_rewards,
    resolve_scorer,
)

TRACEBACKS_SHOWN = 5
MESSAGE_CHARS = 500


class Guardian:
    """Stays between the worker and the process that runs scorers, and runs none itself.

    Whatever ends that process, the worker or a wish of the worker (SIGTERM), this one ends all that
    scorers have started, and then itself in the same way.
    """

    def __init__(self, child: int):
        self._child = child
        adopt_orphans()
        signal.signal(signal.SIGTERM, lambda number, _: self._end(-number))

    def watch(self) -> NoReturn:
        """Waits for the end; collects orphans that have ended meanwhile."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._child:
                self._end(os.waitstatus_to_exitcode(status))

    def _end(self, code: int) -> NoReturn:
        """Ends everything below, then this process with an exit code, or by signal `-code`."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants(os.getpid())
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
            os.kill(os.getpid(), -code)
            time.sleep(END_S)
        os._exit(code if code >= 0 else 1)


def limit_appetite(memory_bytes: int) -> None:
    """Bounds the memory of this process and of each that it starts: more is a MemoryError.

    What a library reserves without use does not count. Where the host lacks memory all the same,
    the kernel is to take these processes before any other.
    """
    if not sys.platform.startswith("linux"):
        return
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    with contextlib.suppress(OSError):  # a container may forbid it
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")


class Pipes:
    """The pipes of the protocol, moved off the standard streams, which then belong to the scorers.

    Processes that a scorer starts do not inherit them. One that it forks finds nothing there: it
    would take requests from this process, and answer them on the same pipe.
    """

    def __init__(self):
        self.requests: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._replies_fd = os.dup(1)
        self._cut_off([0], inheritable=True)
        os.dup2(2, 1)
        os.register_at_fork(
            after_in_child=lambda: self._cut_off(
                [self.requests.fileno(), self._replies_fd], inheritable=False
            )
        )

    def reply(self, message: dict) -> None:
        """Writes one line."""
        data = json.dumps(message, allow_nan=False).encode() + b"\n"
        while data:
            data = data[os.write(self._replies_fd, data) :]

    @staticmethod
    def _cut_off(fds: Sequence[int], *, inheritable: bool) -> None:
        """Puts the null device in the place of these descriptors."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in fds:
            os.dup2(nothing, fd, inheritable)
        os.close(nothing)


def describe_error(error: BaseException) -> str:
    """One line on what a scorer raised, even if its own `__str__` raises."""
    return escape_surrogates(traceback.format_exception_only(error)[-1].strip()[:MESSAGE_CHARS])


def escape_surrogates(text: str) -> str:
    """The text with lone surrogates written as escapes, since it goes on as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Guard:
    """Runs foreign code and turns what it raises into a message; prints the first tracebacks."""

    def __init__(self):
        self._shown = 0
        self._pid = os.getpid()

    def call(self, function: Callable, *arguments: Any) -> tuple[Any, str]:
        """Returns (result, "") or (None, what was raised); only in the process that made this.

        In a process that the function has forked, what it raised travels on and ends it.
        """
        result, problem = None, ""
        try:
            result = function(*arguments)
        # A scorer may raise anything, SystemExit too. Each is the outcome for one completion and is
        # reported to the parent, so no failure is hidden.
        except BaseException as error:
            if os.getpid() != self._pid:
                raise
            problem = self._describe(error)
        if os.getpid() != self._pid:
            sys.exit(0)
        return result, problem

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, BadScorer):
            return escape_surrogates(str(error))
        if self._shown < TRACEBACKS_SHOWN:
            self._shown += 1
            traceback.print_exception(error)
        return describe_error(error)


def load_scorer(name: str, params: dict) -> Scorer:
    """Finds a scorer and checks its parameters."""
    scorer = resolve_scorer(name)
    check_scorer_params(name, scorer, params)
    return scorer


def score_completion(name: str, scorer: Scorer, params: dict, line: bytes) -> dict[str, float]:
    """Runs one scorer on one request, decoded anew so that no scorer sees another's changes."""
    request = json.loads(line)
    result = scorer(
        request["completion"],
        answer=request["answer"],
        prompt=request["prompt"],
        item=request["item"],
        **params,
    )
    return named_rewards(name, result)


def main() -> None:
    """Loads the scorers, then answers requests until stdin ends."""
    signal_with_parent(int(sys.argv[1]), signal.SIGTERM)
    guardian = os.getpid()
    if child := os.fork():
        Guardian(child).watch()
    signal_with_parent(guardian, signal.SIGKILL)
    os.setpgid(0, 0)  # signals to its group are for scorers, and not for the guardian
    limit_appetite(int(sys.argv[2]))
    pipes = Pipes()
    # A scorer that prints does not depend on the terminal's encoding.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    guard = Guard()

    setup = json.loads(pipes.requests.readline())
    sys.path[:] = setup["path"]
    scorers = []
    for function in setup["functions"]:
        pipes.reply({"id": setup["id"], "loading": function["name"]})
        scorer, problem = guard.call(load_scorer, function["name"], function["params"])
        if problem:
            pipes.reply({"id": setup["id"], "refused": problem})
            return
        scorers.append((function["name"], scorer, function["params"]))
    pipes.reply({"id": setup["id"], "ready": True})

    for line in pipes.requests:
        request_id = json.loads(line)["id"]
        for name, scorer, params in scorers:
            rewards, problem = guard.call(score_completion, name, scorer, params, line)
            outcome = {"error": problem} if problem else {"rewards": rewards}
            pipes.reply({"id": request_id, "scorer": name} | outcome)


if __name__ == "__main__":
    main()
