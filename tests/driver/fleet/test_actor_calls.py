"""What a call under way says of its process and method, and which calls a wait returns."""

from typing import Any

import pytest
from ray.exceptions import RayTaskError

from driver.fleet.actor_calls import ActorFailed, Call, wait_for_calls


def call(ref: str, who: str = "rollout-0", method: str = "evaluate") -> Call[Any]:
    named: Any = ref
    return Call(named, who, method)


def test_an_error_of_the_method_names_process_and_method(monkeypatch):
    def get(ref):
        raise RayTaskError("evaluate", "ValueError: no prompt 9", ValueError("no prompt 9"))

    monkeypatch.setattr("driver.fleet.actor_calls.ray.get", get)
    with pytest.raises(ActorFailed, match="rollout-0 failed in 'evaluate': .*no prompt 9"):
        call("ref").result()


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
