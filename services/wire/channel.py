"""How a client of the run connects, waits and tries again.

Every call goes through a `Deadline`, whose error names peer and purpose. Only UNAVAILABLE is tried
again, until the deadline; gRPC's own retries are off.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from services.wire.tls import SERVER_NAME, Credentials

MESSAGE_CAP_BYTES = 4 * 2**20
"""Largest message either side sends or takes; large things travel in pieces."""
PIECE_BYTES = 2**20
"""Usual piece of a large thing. gRPC builds each message in fresh memory, twice; at 2 MiB and above
that memory comes from the system anew, and its page faults cost a third of the receiver's time."""

SHARED_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MESSAGE_CAP_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_CAP_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
"""Options that both ends must agree on."""

WINDOW_BYTES = 8 * 2**20
"""What a server may send ahead of a client that is busy, on each call; bounds the client's memory,
and lets 8 GB/s pass at a round trip of 1 ms."""

CLIENT_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *SHARED_OPTIONS,
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.enable_http_proxy", 0),  # peers of a run are reached directly, whatever http_proxy says
    ("grpc.enable_retries", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # it lets the window grow without a known bound
    ("grpc.use_local_subchannel_pool", 1),  # a channel is a connection of its own
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

T = TypeVar("T")


def open_channel(
    address: str,
    credentials: Credentials,
    options: Sequence[tuple[str, int | str]] = CLIENT_OPTIONS,
) -> grpc.Channel:
    """Returns a mutual TLS channel to `host:port`; it connects with its first call.

    Args:
        options: others than those of a client only to test what a server refuses.
    """
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(
            root_certificates=credentials.ca_pem,
            private_key=credentials.key_pem,
            certificate_chain=credentials.cert_pem,
        ),
        options=options,
    )


class Deadline:
    """A moment by which a peer must have answered."""

    def __init__(self, timeout_s: float, waiting_for: str):
        """Starts the clock.

        Args:
            timeout_s: from now.
            waiting_for: the peer and the purpose, for the error.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s} for {waiting_for}")
        self.timeout_s = timeout_s
        self.waiting_for = waiting_for
        self._end_s = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds until the deadline, >= 0."""
        return max(0.0, self._end_s - time.monotonic())

    def error(self, reason: str) -> TimeoutError:
        """Returns the error of a deadline that has passed."""
        return TimeoutError(f"waited {self.timeout_s:g} s for {self.waiting_for}: {reason}")

    def call(self, attempt: Callable[[float], T]) -> T:
        """Returns what `attempt(timeout_s)` returns, tried again while it is UNAVAILABLE.

        Raises:
            TimeoutError: if the deadline passes first.
            grpc.RpcError: with any status but UNAVAILABLE and DEADLINE_EXCEEDED.
        """
        backoff = Backoff(self)
        while True:
            try:
                return attempt(self.remaining_s())
            except grpc.RpcError as error:
                backoff.pause_after(error)


class Backoff:
    """Growing pauses between attempts, up to a deadline."""

    def __init__(self, deadline: Deadline):
        self._deadline = deadline
        self._pause_s = FIRST_PAUSE_S
        self._last_reason = "no answer"

    def pause_after(self, error: grpc.RpcError) -> None:
        """Sleeps if the status is UNAVAILABLE; otherwise raises, as `Deadline.call` describes."""
        status = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        if status is grpc.StatusCode.UNAVAILABLE:
            self.pause(str(error.details()))  # pyright: ignore[reportAttributeAccessIssue]
        elif status is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise self._deadline.error(self._last_reason) from error
        else:
            raise error

    def pause(self, reason: str) -> None:
        """Sleeps before the next attempt; raises TimeoutError if the deadline has passed."""
        self._last_reason = reason
        remaining_s = self._deadline.remaining_s()
        if remaining_s == 0:
            raise self._deadline.error(reason)
        time.sleep(min(self._pause_s, remaining_s))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def reset(self) -> None:
        """Starts over after an attempt that made progress."""
        self._pause_s = FIRST_PAUSE_S
