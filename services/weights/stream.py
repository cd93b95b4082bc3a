"""One connection's part in a transfer: a thread that fetches segments until none is left.

A connection that breaks or is silent goes on at the first byte it lacks.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from services.pb import weights_pb2
from services.process import failpoints
from services.weights import codec
from services.weights.transfer import Transfer, Unreachable
from services.wire.channel import Backoff, Deadline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which bytes of a server's."""

    run_id: str
    policy_version: int
    base_version: int | None = None
    """The version against which a delta is wanted; None for the version itself."""


class Stream:
    """Call `run` in a thread, the other methods from another."""

    def __init__(
        self,
        connect: Callable[[], grpc.Channel],
        wanted: Wanted,
        transfer: Transfer,
        deadline: Deadline,
        patience_s: float | None,
    ):
        """Args:
        connect: opens a connection to the server.
        wanted: what the segments are ranges of.
        transfer: hands out segments and takes pieces.
        deadline: of the transfer.
        patience_s: gives up after so long without a byte; None only at the deadline.
        """
        self._connect = connect
        self._channel = connect()
        self._wanted = wanted
        self._transfer = transfer
        self._deadline = deadline
        self._patience_s = patience_s
        self._stopped = threading.Event()
        self._silent = threading.Event()
        self._call: grpc.Call | None = None
        self._heard_s = 0.0  # of this call
        self._got_s = time.monotonic()  # of any

    def run(self) -> None:
        """Fetches segments until none is left; leaves what it could not fetch to others.

        Raises:
            grpc.RpcError: if the server refuses.
            TimeoutError: if the deadline passes first.
            WeightTransferError: if the server sends what was not asked for, or Unreachable, if it
                sends nothing for longer than `patience_s`.
        """
        try:
            while not self._stopped.is_set() and (segment := self._transfer.take_segment()):
                self._fetch(segment)
        finally:
            self._channel.close()

    def stop(self) -> None:
        """Ends `run` early."""
        self._stopped.set()
        if (call := self._call) is not None:
            call.cancel()

    def cut_if_silent(self, chunk_timeout_s: float) -> None:
        """Breaks the call if its next piece is overdue."""
        call = self._call
        if call is not None and time.monotonic() - self._heard_s > chunk_timeout_s:
            self._silent.set()
            call.cancel()

    def _fetch(self, segment: range) -> None:
        position = segment.start
        backoff = Backoff(self._deadline)
        try:
            while position < segment.stop and not self._stopped.is_set():
                reached = position
                try:
                    for piece in self._open(position, segment.stop - position):
                        self._heard_s = self._got_s = time.monotonic()
                        position = self._transfer.write(segment, position, piece)
                        failpoints.reach("worker.receive")
                    if position < segment.stop:
                        raise self._transfer.error(
                            f"the stream ended well at byte {position} of [{segment.start}, "
                            f"{segment.stop})"
                        )
                except grpc.RpcError as error:
                    if position > reached:
                        backoff.reset()
                    self._pause(backoff, error)
                finally:
                    self._call = None
        finally:
            self._transfer.give_back(range(position, segment.stop))

    def _open(self, offset: int, length: int) -> Iterator[codec.Piece]:
        request = weights_pb2.FetchWeightsRequest(
            run_id=self._wanted.run_id,
            policy_version=self._wanted.policy_version,
            offset_bytes=offset,
            length_bytes=length,
            base_policy_version=self._wanted.base_version,
        )
        self._silent.clear()
        self._heard_s = time.monotonic()
        method = self._channel.unary_stream(
            f"/{codec.WEIGHT_SERVICE}/FetchWeights",
            request_serializer=weights_pb2.FetchWeightsRequest.SerializeToString,
            response_deserializer=codec.decode_piece,
        )
        call = method(request, timeout=self._deadline.remaining_s())
        self._call = call
        if self._stopped.is_set():  # `stop` may have come before there was a call to cancel
            call.cancel()
        return call

    def _pause(self, backoff: Backoff, error: grpc.RpcError) -> None:
        if self._stopped.is_set():
            return
        quiet_s = time.monotonic() - self._got_s
        if self._patience_s is not None and quiet_s >= self._patience_s:
            raise Unreachable(
                f"{self._transfer.peer} sent nothing for {quiet_s:.1f} s: {status_of(error)}"
            ) from error
        if self._silent.is_set():
            self._channel.close()  # its connection may be what hangs
            self._channel = self._connect()
            backoff.pause("the connection was silent for too long")
        else:
            backoff.pause_after(error)


def status_of(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
