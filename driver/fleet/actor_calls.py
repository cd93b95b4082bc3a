"""Calls of actors that are under way: waiting for some of them, and what their errors say."""

import re
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

import ray
from ray.exceptions import (
    RayActorError,
    RayError,
    RayTaskError,
    UnserializableException,
    UserCodeException,
    WorkerCrashedError,
)

from driver.errors import RunError
from driver.fleet.cluster import ResourcesNotMet

T_co = TypeVar("T_co", covariant=True)

_RAISED = re.compile(r"[A-Za-z_][\w.]*: ")
"""A line such as `package.SomeError: what happened`, not indented."""
_HOST_LOST = re.compile(r"\bnode (has )?died|node was (dead|terminated|preempted)", re.I)
"""In what Ray says of an actor whose host is gone."""
_CONSTRUCTOR = "creation task"
"""In what Ray says of an actor whose constructor raised."""


class ActorFailed(RunError):
    """An actor could not start, or raised an error of its own."""


class ActorLost(RunError):
    """The process of an actor is gone, or its host, or what it answered."""

    @classmethod
    def by(cls, error: RayError) -> "ActorLost":
        """What an error of Ray's means that no method of the actor raised."""
        return cls(message_of(error), details=str(error))

    @property
    def by_constructor(self) -> bool:
        """Whether its constructor raised, as it would again."""
        return _CONSTRUCTOR in self.details


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

    def __init__(self, ref: "ray.ObjectRef | RayError", who: str, method: str):
        """Args:
        ref: Ray's reference to the result, or why the actor cannot be called any more.
        who: the process that is called, for errors.
        method: that is called, for errors.
        """
        self.ref = ref
        self.who = who
        self.method = method

    @classmethod
    def start(cls, submit: "Callable[[], ray.ObjectRef]", who: str, method: str) -> "Call[T_co]":
        """Calls an actor; an actor that is gone shows in the result."""
        try:
            return cls(submit(), who, method)
        except RayError as error:
            return cls(error, who, method)

    def result(self) -> T_co:
        """The result of a call that has ended.

        Raises:
            ActorFailed: if it raised an error of its own.
            ActorLost: for every other error of Ray's.
        """
        try:
            if isinstance(self.ref, RayError):
                raise self.ref
            return ray.get(self.ref)
        except RayError as error:
            if not raised_by_actor(error):
                raise ActorLost.by(error) from error
            raise ActorFailed(
                f"{self.who} failed in {self.method!r}: {message_of(error)}", details=str(error)
            ) from error


def raised_by_actor(error: RayError) -> bool:
    """Whether the called method raised; every other error of Ray's means that the actor is lost.

    Ray adds kinds of errors with its versions, so none is named here but those of the method.
    """
    if isinstance(error, UnserializableException):
        return True
    if not isinstance(error, RayTaskError):
        return False
    # A plain RayError stands for an exception that cannot be sent; other kinds are of arguments
    # that never arrived.
    cause = error.cause
    of_ray = isinstance(cause, RayError) and type(cause) is not RayError
    return not of_ray or isinstance(cause, UserCodeException)


def blames_groups(error: RunError) -> bool:
    """Whether a worker may have ended over a group that it completed or scored.

    The loss of its host, a lost connection or weights that do not arrive are not a group's doing.
    """
    if isinstance(error, ActorFailed):
        return "GroupsFailed: " in str(error)
    if isinstance(error, StandsStill):
        return error.doing in ("prefill", "decode", "reward", "environment", "unexplained")
    if not isinstance(error, ActorLost) or error.by_constructor:
        return False
    return not _HOST_LOST.search(error.details)


def wait_for_calls(
    calls: Collection[Call[object]], timeout_s: float, *, every: bool = False
) -> set[Call[object]]:
    """Waits until one call has ended, or all of them; returns those that have ended.

    Args:
        timeout_s: after which it returns in any case.
        every: whether all are waited for.
    """
    failed = {call for call in calls if isinstance(call.ref, RayError)}
    by_ref = {call.ref: call for call in calls if not isinstance(call.ref, RayError)}
    if not by_ref:
        return failed
    refs = [*by_ref]
    timeout_s = 0 if failed and not every else timeout_s
    ended, _ = ray.wait(refs, num_returns=len(refs) if every else 1, timeout=timeout_s)
    if ended and not every:  # others may have ended too
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
    return failed | {by_ref[ref] for ref in ended}


def message_of(error: RayError) -> str:
    """What went wrong in an actor, in a line or a few."""
    text = str(error).strip()
    if isinstance(error, (RayActorError, WorkerCrashedError)) and _CONSTRUCTOR not in text:
        return "its process ended unexpectedly: killed, out of memory, or crashed"
    lines = text.splitlines()
    if isinstance(error, (RayTaskError, RayActorError, UnserializableException)):
        # the end of the traceback that Ray sends as text
        starts = [i for i, line in enumerate(lines) if _RAISED.match(line)]
        return "\n".join(lines[starts[-1] :] if starts else lines[-1:])
    return f"its process is lost: {type(error).__name__}: {lines[0] if lines else ''}"


def start_failure(error: RunError, who: str) -> RunError:
    """The error to show a user when an actor did not start."""
    if not isinstance(error, ActorLost):
        return error
    kind = ResourcesNotMet if "WrongPlatform: " in str(error) else ActorFailed
    return kind(f"{who} could not start: {error}", details=error.details)
