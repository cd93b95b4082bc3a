import itertools
import time

import grpc
import pytest

from services.wire.channel import Deadline


class Failed(grpc.RpcError):
    """What a stub raises, as far as a deadline looks at it."""

    def __init__(self, status: grpc.StatusCode, details: str = ""):
        self.code = lambda: status
        self.details = lambda: details


def failing(*statuses: grpc.StatusCode):
    """Returns an attempt that fails in these ways, then succeeds."""
    errors = [Failed(status, f"details of {status.name}") for status in statuses]
    left = itertools.chain(errors, [None])

    def attempt(timeout_s: float) -> float:
        if (error := next(left)) is not None:
            raise error
        return timeout_s

    return attempt


def test_unavailable_is_tried_again_with_the_time_that_is_left():
    deadline = Deadline(10.0, "a peer")
    left_s = deadline.call(failing(*[grpc.StatusCode.UNAVAILABLE] * 2))
    assert 9.0 < left_s <= 10.0 - 0.05 - 0.1


RETRIED_OR_TIMEOUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.mark.parametrize("status", [s for s in grpc.StatusCode if s not in RETRIED_OR_TIMEOUT])
def test_other_statuses_are_not_tried_again(status):
    with pytest.raises(Failed, check=lambda error: error.code() is status):
        Deadline(10.0, "a peer").call(failing(status))


def test_deadline_says_who_was_waited_for_and_why_it_did_not_answer():
    start_s = time.monotonic()
    always = failing(*[grpc.StatusCode.UNAVAILABLE] * 99)
    with pytest.raises(TimeoutError, match="waited 0.2 s for a peer: details of UNAVAILABLE"):
        Deadline(0.2, "a peer").call(always)
    assert time.monotonic() - start_s >= 0.2


def test_silence_after_unavailable_tells_the_last_reason():
    attempt = failing(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    with pytest.raises(TimeoutError, match="for a peer: details of UNAVAILABLE"):
        Deadline(5.0, "a peer").call(attempt)
    with pytest.raises(TimeoutError, match="for a peer: no answer"):
        Deadline(5.0, "a peer").call(failing(grpc.StatusCode.DEADLINE_EXCEEDED))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_wait_without_a_bound_is_refused(timeout_s):
    with pytest.raises(ValueError, match="must be positive, got .* for a peer"):
        Deadline(timeout_s, "a peer")
