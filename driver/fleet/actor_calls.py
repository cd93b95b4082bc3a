"""Calls of actors that are under way: waiting for some of them, and what their errors say."""

import re
from collections.abc import Collection
from typing import Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError

from driver.errors import RunError
from driver.fleet.cluster import ResourcesNotMet

T_co = TypeVar("T_co", covariant=True)

GONE = (RayActorError, WorkerCrashedError)
"""What Ray raises when the process of an actor has ended."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*: ")
"""A line such as `package.SomeError: what happened`, not indented."""
_HOST_LOST = re.compile(r"\bnode (has )?died|node was (dead|terminated|preempted)", re.I)
"""In what Ray says of an actor whose host is gone."""


class ActorFailed(RunError):
    """An actor could not start, or raised an error of its own."""


class LearnerLost(RunError):
    """The learner process died, or must be replaced."""


class NoAnswer(RunError):
    """An actor did not answer within its deadline."""


class StandsStill(RunError):
    """An actor answers, and makes no progress."""

    def __init__(self, message: str, *, doing: str):
        super().__init__(message)
        self.doing = doing
        """The phase in which it hangs."""


class Call(Generic[T_co]):
    """A call of an actor that has started; its result is awaited with `wait_for_calls`."""

    def __init__(self, ref: ray.ObjectRef, who: str, method: str):
        """Args:
        ref: Ray's reference to the result.
        who: the process that is called, for errors.
        method: that is called, for errors.
        """
        self.ref = ref
        self.who = who
        self.method = method

    def result(self) -> T_co:
        """The result of a call that has ended.

        Raises:
            ActorFailed: if it raised an error of its own.
            RayActorError, WorkerCrashedError: if its process is gone.
        """
        try:
            return ray.get(self.ref)
        except GONE:
            raise
        except RayTaskError as error:
            raise ActorFailed(
                f"{self.who} failed in {self.method!r}: {message_of(error)}", details=str(error)
            ) from error


def wait_for_calls(
    calls: Collection[Call[object]], timeout_s: float, *, every: bool = False
) -> set[Call[object]]:
    """Waits until one call has ended, or all of them; returns those that have ended.

    Args:
        timeout_s: after which it returns in any case.
        every: whether all are waited for.
    """
    if not calls:
        return set()
    by_ref = {call.ref: call for call in calls}
    refs = [*by_ref]
    ended, _ = ray.wait(refs, num_returns=len(refs) if every else 1, timeout=timeout_s)
    if ended and not every:  # others may have ended too
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
    return {by_ref[ref] for ref in ended}


def died(error: BaseException) -> bool:
    """Whether a process ended by itself, and not by an error of its constructor."""
    return isinstance(error, RayActorError) and "creation task" not in str(error)


def blames_groups(error: BaseException) -> bool:
    """Whether a worker may have ended over a group that it completed or scored.

    The loss of its host, a lost connection or weights that do not arrive are not a group's doing.
    """
    if isinstance(error, ActorFailed):
        return "GroupsFailed: " in str(error)
    if isinstance(error, StandsStill):
        return error.doing in ("prefill", "decode", "reward", "unexplained")
    return died(error) and not _HOST_LOST.search(str(error))


def message_of(error: BaseException) -> str:
    """What went wrong in an actor: the end of the traceback that Ray sends as text."""
    if died(error):
        return "its process ended unexpectedly: killed, out of memory, or crashed"
    lines = str(error).strip().splitlines()
    starts = [i for i, line in enumerate(lines) if _RAISED.match(line)]
    return "\n".join(lines[starts[-1] :] if starts else lines[-1:])


def start_failure(error: BaseException, who: str) -> RunError:
    """The error to show a user when the constructor of an actor failed."""
    if isinstance(error, RunError):
        return error
    message = message_of(error)
    kind = ResourcesNotMet if "WrongPlatform: " in message else ActorFailed
    return kind(f"{who} could not start: {message}", details=str(error))
