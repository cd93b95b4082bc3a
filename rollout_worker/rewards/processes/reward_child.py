"""The process that runs scorers:
`python -m rollout_worker.rewards.processes.reward_child PARENT_PID BYTES`.

Speaks lines of JSON with `reward_process.py` over the pipes that it was started with; every line
out has the `id` of the line in that it answers. The first line in says which scorers to load; the
answer is `{"loading": name}` before each and then `{"ready": kinds}` or `{"refused": message}`.
Every later line in is a request: one completion, or those of a group, with the names of the scorers
to run. The answer is one line per scorer, `{"scorer": name}` with either `{"rewards": [{...}]}`, an
entry for each completion, and perhaps as many `"notes"`, or `{"error": message}`. Any line may have
`"spent"`, what was spent since the line before. Requests to plain scorers are answered one after
another; the first one to async scorers begins the loop of `concurrent_requests.py`.

Scorers are foreign code. What they print goes to stderr, what they raise becomes an error message
to the parent, and the parent kills this process when they take too long. A process that they fork
runs on as they wrote it, but has no part in the protocol. All of them have at most BYTES of memory
each, and end with this process, whatever session they are in.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Generic, NoReturn, Protocol, TypeVar

from rollout_worker.rewards.processes.loaded_scorer import LoadedScorer
from rollout_worker.rewards.processes.process_tree import (
    END_S,
    adopt_orphans,
    end_descendants,
    signal_with_parent,
)
from rollout_worker.rewards.reward_values import NO_REWARD, BadResult
from rollout_worker.rewards.scorers import BadScorer, ScorerKind
from rollout_worker.rewards.spending import METER

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
        self.keep_from_copies([self.requests.fileno(), self._replies_fd])

    def keep_from_copies(self, fds: Sequence[int]) -> None:
        """A process that is forked from this one finds nothing at these descriptors."""
        os.register_at_fork(after_in_child=lambda: self._cut_off(fds, inheritable=False))

    def reply(self, message: dict) -> None:
        """Writes one line."""
        if spent := METER.take_spending():
            message = {**message, "spent": dataclasses.asdict(spent)}
        text = json.dumps(message, allow_nan=False, ensure_ascii=False)
        data = text.encode("utf-8", "backslashreplace") + b"\n"  # half a surrogate as JSON has it
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
            problem = self.describe(error)
        if os.getpid() != self._pid:
            sys.exit(0)
        return result, problem

    def describe(self, error: BaseException) -> str:
        """One line on what foreign code raised; its traceback is printed where it is among the
        first.
        """
        if isinstance(error, BadScorer):
            return escape_surrogates(str(error))
        if isinstance(error, BadResult):  # it says all that there is to say
            return escape_surrogates(f"{NO_REWARD}{error}"[:MESSAGE_CHARS])
        if self._shown < TRACEBACKS_SHOWN:
            self._shown += 1
            traceback.print_exception(error)
        return describe_error(error)


class Loaded(Protocol):
    """What answers requests under one name; `LoadedScorer` is one."""

    @property
    def kind(self) -> ScorerKind:
        """How it is called."""
        ...


L = TypeVar("L", bound=Loaded)


@dataclasses.dataclass(frozen=True)
class Child(Generic[L]):
    """This process, with what answers its requests."""

    pipes: Pipes
    guard: Guard
    scorers: dict[str, L]
    """By name."""


def start_child(load: Callable[[str, dict[str, Any]], L]) -> Child[L] | None:
    """Becomes a child under a guardian, and loads what the parent asks for; None if one is refused.

    Args:
        load: makes one from its name and parameters; raises BadScorer where that cannot be.
    """
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
    scorers: dict[str, L] = {}
    for function in setup["functions"]:
        name, params = function["name"], function["params"]
        pipes.reply({"id": setup["id"], "loading": name})
        scorer, problem = guard.call(load, name, params)
        if problem:
            pipes.reply({"id": setup["id"], "refused": problem})
            return None
        scorers[name] = scorer
    kinds = {name: dataclasses.asdict(scorer.kind) for name, scorer in scorers.items()}
    pipes.reply({"id": setup["id"], "ready": kinds})
    return Child(pipes, guard, scorers)


def main() -> None:
    """Loads the scorers, then answers requests until stdin ends."""
    child = start_child(LoadedScorer.load)
    if child is None:
        return
    pipes, guard, scorers = child.pipes, child.guard, child.scorers
    for line in pipes.requests:
        request = json.loads(line)
        if any(scorers[name].kind.is_async for name in request["scorers"]):
            # Loading asyncio takes time that plain scorers need not spend.
            from rollout_worker.rewards.processes.concurrent_requests import ConcurrentRequests

            lines = itertools.chain([line], pipes.requests)
            ConcurrentRequests(scorers, pipes, guard).run(lines)
            return
        for name in request["scorers"]:
            outcome, problem = guard.call(scorers[name].score, line)
            if problem:
                outcome = {"error": problem, "late": False, "doubtful": False}
            pipes.reply({"id": request["id"], "scorer": name} | outcome)


if __name__ == "__main__":
    main()
