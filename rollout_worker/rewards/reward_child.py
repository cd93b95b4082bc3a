"""The process that runs scorers: `python -m rollout_worker.rewards.reward_child PARENT_PID`.

Speaks lines of JSON with `reward_process.py` over the pipes that it was started with. The first
line in says which scorers to load; the answer is `{"loading": name}` before each and then
`{"ready": true}` or `{"refused": message}`. Every later line in is one completion; the answer is
one line per scorer, `{"rewards": {...}}` or `{"error": message}`.

Scorers are foreign code. What they print goes to stderr, what they raise becomes an error message
to the parent, and the parent kills this process when they take too long.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from rollout_worker.rewards.scorers import (
    BadScorer,
    Scorer,
    check_scorer_params,
    named_rewards,
    resolve_scorer,
)

TRACEBACKS_SHOWN = 5
MESSAGE_CHARS = 500
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends (Linux only).

    On other systems the end of stdin ends it, once the running scorer has returned.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves the protocol off the standard streams, which then belong to the scorers.

    Returns:
        (requests, replies): unbuffered for writing; neither is inherited by a scorer's processes.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    return requests, replies


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

    def call(self, function: Callable, *arguments: Any) -> tuple[Any, str]:
        """Returns (result, "") or (None, what was raised)."""
        try:
            return function(*arguments), ""
        except BadScorer as error:
            return None, escape_surrogates(str(error))
        # A scorer may raise anything, SystemExit too. Each is the outcome for one completion and is
        # reported to the parent, so no failure is hidden.
        except BaseException as error:
            if self._shown < TRACEBACKS_SHOWN:
                self._shown += 1
                traceback.print_exception(error)
            return None, describe_error(error)


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
    die_with_parent(int(sys.argv[1]))
    requests, replies = take_pipes()
    guard = Guard()

    def reply(message: dict) -> None:
        data = json.dumps(message, allow_nan=False).encode() + b"\n"
        while data:
            data = data[replies.write(data) :]

    setup = json.loads(requests.readline())
    sys.path[:] = setup["path"]
    scorers = []
    for function in setup["functions"]:
        reply({"loading": function["name"]})
        scorer, problem = guard.call(load_scorer, function["name"], function["params"])
        if problem:
            reply({"refused": problem})
            return
        scorers.append((function["name"], scorer, function["params"]))
    reply({"ready": True})

    for line in requests:
        for name, scorer, params in scorers:
            rewards, problem = guard.call(score_completion, name, scorer, params, line)
            reply({"error": problem} if problem else {"rewards": rewards})


if __name__ == "__main__":
    main()
