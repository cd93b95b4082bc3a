"""What a call under way says of its process and method, and which calls a wait returns."""

import inspect
from typing import Any

import pytest
import ray.exceptions
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    UnserializableException,
    UserCodeException,
    WorkerCrashedError,
)

from driver.fleet.actor_calls import (
    ActorFailed,
    ActorLost,
    Call,
    start_failure,
    wait_for_calls,
)
from driver.fleet.cluster import ResourcesNotMet


def call(ref: object, who: str = "rollout-0", method: str = "evaluate") -> Call[Any]:
    named: Any = ref
    return Call(named, who, method)


def lost(monkeypatch, error: BaseException) -> BaseException:
    """What the result of a call raises for which Ray raises an error."""

    def get(ref):
        raise error

    monkeypatch.setattr("driver.fleet.actor_calls.ray.get", get)
    with pytest.raises((ActorLost, ActorFailed)) as raised:
        call("ref").result()
    return raised.value


def raised_in_method(cause: Exception) -> RayTaskError:
    return RayTaskError("evaluate", f"{type(cause).__name__}: {cause}", cause)


def test_an_error_of_the_method_names_process_and_method(monkeypatch):
    error = lost(monkeypatch, raised_in_method(ValueError("no prompt 9")))
    assert isinstance(error, ActorFailed)
    assert str(error).startswith("rollout-0 failed in 'evaluate': ")
    assert "no prompt 9" in str(error)


KINDS = sorted(
    (
        kind
        for _, kind in inspect.getmembers(ray.exceptions, inspect.isclass)
        if issubclass(kind, RayError)
    ),
    key=lambda kind: kind.__name__,
)
OF_THE_METHOD = {RayTaskError, UnserializableException}


def made(kind: type[RayError]) -> RayError:
    """An error of a kind, whatever its constructor asks for."""
    error = kind.__new__(kind)
    error.__dict__.update(
        dict.fromkeys(("message", "error_msg", "error_message", "reason"), "text of Ray's")
    )
    return error


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_of_ray_but_the_methods_own_means_that_the_actor_is_lost_R03(monkeypatch, kind):
    error = raised_in_method(ValueError("x")) if kind is RayTaskError else made(kind)
    monkeypatch.setattr(kind, "__str__", lambda self: "text of Ray's")
    assert isinstance(lost(monkeypatch, error), ActorFailed if kind in OF_THE_METHOD else ActorLost)


def test_the_kinds_that_were_met_are_among_them_F08_R03(monkeypatch):
    met = [
        OutOfMemoryError("Task was killed due to the node running low on memory.\nMore"),
        ObjectReconstructionFailedError("ab", b"", "site"),
        ObjectLostError("ab", b"", "site"),
        NodeDiedError("the node died"),
        WorkerCrashedError(),
        ActorUnschedulableError("no node has it"),
    ]
    assert [type(lost(monkeypatch, error)) for error in met] == [ActorLost] * len(met)
    assert str(lost(monkeypatch, met[0])) == (
        "its process is lost: OutOfMemoryError: Task was killed due to the node running low on "
        "memory."
    )


def test_an_argument_that_never_arrived_is_no_error_of_the_method(monkeypatch):
    def caused_by(cause: Exception) -> type[BaseException]:
        return type(lost(monkeypatch, raised_in_method(cause)))

    assert caused_by(ObjectLostError("ab", b"", "site")) is ActorLost
    assert caused_by(RayError("an exception that cannot be sent")) is ActorFailed
    assert caused_by(UserCodeException("of a function")) is ActorFailed
    assert caused_by(OSError(28, "No space left")) is ActorFailed


def test_an_actor_that_cannot_be_called_any_more_shows_in_the_result():
    def submit():
        raise ActorDiedError

    failed = Call.start(submit, "rollout-0", "news")
    assert wait_for_calls([failed], 1.0) == {failed}
    with pytest.raises(ActorLost, match="its process ended unexpectedly"):
        failed.result()


def test_a_constructor_that_raised_is_told_from_a_process_that_ended(monkeypatch):
    raised = RayActorError(
        "0123",
        "The actor died because of an error raised in its creation task, ray::A.__init__()\n"
        "models.platform.WrongPlatform: placement.platform=tpu, but JAX found cpu",
    )
    by_constructor, ended = lost(monkeypatch, raised), lost(monkeypatch, RayActorError())
    assert isinstance(by_constructor, ActorLost) and by_constructor.by_constructor
    assert isinstance(ended, ActorLost) and not ended.by_constructor
    assert isinstance(start_failure(by_constructor, "the learner"), ResourcesNotMet)
    assert str(start_failure(ended, "the learner")) == (
        "the learner could not start: its process ended unexpectedly: killed, out of memory, or "
        "crashed"
    )


def test_a_wait_returns_every_call_that_has_ended_by_then(monkeypatch):
    ended = {"a", "c"}

    def wait(refs, num_returns, timeout):
        there = [ref for ref in refs if ref in ended]
        first = there[:num_returns] if timeout else there
        return first, [ref for ref in refs if ref not in first]

    monkeypatch.setattr("driver.fleet.actor_calls.ray.wait", wait)
    calls = {name: call(name) for name in "abc"}
    assert wait_for_calls(calls.values(), 1.0) == {calls["a"], calls["c"]}
    assert wait_for_calls([calls["b"]], 1.0) == set()
    assert wait_for_calls([], 1.0) == set()
    failed = call(WorkerCrashedError())
    assert wait_for_calls([calls["b"], failed], 1.0) == {failed}
