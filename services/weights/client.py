"""Asks one server for policy versions, and fetches their bytes.

Several connections share a transfer. One that breaks goes on at the first byte it lacks; bytes
that are wrong end the transfer. `weights/replica.py` goes from one server to the next.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from services.pb import weights_pb2, weights_pb2_grpc
from services.process import failpoints
from services.weights import codec
from services.weights.delta import DeltaManifest, check_delta
from services.weights.digest import check_manifest
from services.weights.transfer import NotHeld, Transfer, Unreachable, WeightTransferError
from services.wire.channel import Backoff, Deadline, open_channel
from services.wire.messages import WeightManifest
from services.wire.tls import Credentials

POLL_S = 0.1
"""Between two checks of a transfer or of a request that the server holds."""

_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
"""Statuses that gRPC sets itself, where the server sent none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """A server's answer about its newest version."""

    manifest: WeightManifest | None
    """None while it is older than was asked for."""
    current_version: int
    depth: int
    """Transfers between the publisher and this server, if there is a manifest."""


def _never() -> bool:
    return False


class WeightClient:
    """Connections to one weight service; each method makes one attempt."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        run_id: str,
        streams: int = 2,
        chunk_timeout_s: float = 30.0,
    ):
        """Connects with the first call.

        Args:
            address: `host:port` of a server of weights.
            credentials: of this process.
            run_id: the run whose versions are wanted.
            streams: connections that share a transfer, >= 1.
            chunk_timeout_s: a connection that is silent for this long is cut and opened again.
        """
        if streams < 1 or not chunk_timeout_s > 0:
            raise ValueError(
                f"streams must be at least 1 and chunk_timeout_s positive, got {streams} and "
                f"{chunk_timeout_s}"
            )
        self.address = address
        self._peer = f"weight service {address}"
        self._run_id = run_id
        self._chunk_timeout_s = chunk_timeout_s
        self._streams = streams
        self._connect = lambda: open_channel(address, credentials)
        self._channel = self._connect()
        self._stub = weights_pb2_grpc.WeightServiceStub(self._channel)

    def ask_manifest(
        self,
        min_version: int,
        *,
        wait_s: float,
        timeout_s: float,
        stopped: Callable[[], bool] = _never,
    ) -> Offer:
        """Asks once for the newest manifest.

        Args:
            min_version: oldest policy version that helps.
            wait_s: how long the server may hold the request while it has none.
            timeout_s: bound of the whole call.
            stopped: ends the call early, with Unreachable.

        Raises:
            Unreachable: if the server did not answer in time.
            WeightTransferError: if the server refuses, or its manifest contradicts itself.
        """
        request = weights_pb2.GetManifestRequest(
            run_id=self._run_id, min_policy_version=min_version, wait_s=wait_s
        )
        response = self._answer(self._stub.GetManifest.future(request, timeout=timeout_s), stopped)
        manifest = None
        if response.HasField("manifest"):
            with self._blaming_server():
                manifest = codec.decode_manifest(response.manifest)
                check_manifest(manifest)
            if manifest.run_id != self._run_id or manifest.policy_version < min_version:
                raise WeightTransferError(
                    f"{self._peer} offered version {manifest.policy_version} of run "
                    f"{manifest.run_id!r}, asked for >= {min_version} of {self._run_id!r}"
                )
        return Offer(
            manifest=manifest,
            current_version=response.current_policy_version,
            depth=response.relay_depth,
        )

    def ask_delta(
        self,
        manifest: WeightManifest,
        base: WeightManifest,
        *,
        wait_s: float,
        timeout_s: float,
        stopped: Callable[[], bool] = _never,
    ) -> DeltaManifest | None:
        """Asks once for the delta of a version against one that is held; None if there is none.

        Raises:
            Unreachable: if the server did not answer in time.
            WeightTransferError: if the server refuses, or its answer does not fit the version.
        """
        request = weights_pb2.GetDeltaRequest(
            run_id=self._run_id,
            policy_version=manifest.policy_version,
            base_policy_version=base.policy_version,
            base_digest=base.digest,
            wait_s=wait_s,
        )
        call = self._stub.GetDelta.future(request, timeout=timeout_s)
        try:
            response = self._answer(call, stopped)
        except NotHeld:
            return None
        with self._blaming_server():
            delta = codec.decode_delta_manifest(response)
            check_delta(delta, manifest.tensors)
        return delta

    def fill(
        self,
        transfer: Transfer,
        deadline: Deadline,
        *,
        base_version: int | None = None,
        patience_s: float | None = None,
        stopped: Callable[[], bool] = _never,
    ) -> None:
        """Fetches what a transfer lacks, and checks it; what arrived stays if that fails.

        Args:
            transfer: of a version, or of its delta.
            deadline: of the whole transfer.
            base_version: against which the delta was made; None for the version itself.
            patience_s: gives up after this long without a byte; None only at the deadline.
            stopped: ends the transfer early, with Unreachable.

        Raises:
            Unreachable: if the server fell silent, or time ran out.
            WeightTransferError: if it refuses, or sends what is wrong: that is fetched again.
        """
        transfer.source = self.address
        request = weights_pb2.FetchWeightsRequest(
            run_id=self._run_id,
            policy_version=transfer.manifest.policy_version,
            base_policy_version=base_version,
        )
        try:
            with concurrent.futures.ThreadPoolExecutor(self._streams) as pool:
                streams = [
                    _Stream(self._connect, request, transfer, deadline, patience_s)
                    for _ in range(self._streams)
                ]
                try:
                    self._watch(streams, pool, transfer, patience_s, stopped)
                except grpc.RpcError as error:
                    raise transfer.error(_status_of(error)) from error
                except TimeoutError as error:
                    raise Unreachable(str(transfer.error(str(error)))) from error
                finally:
                    for stream in streams:
                        stream.stop()
        finally:
            mismatch = transfer.reject_wrong()
        if mismatch is not None:
            raise mismatch

    def close(self) -> None:
        """Ends the connection; `fill` opens and closes its own."""
        self._channel.close()

    def _watch(
        self,
        streams: Sequence["_Stream"],
        pool: concurrent.futures.Executor,
        transfer: Transfer,
        patience_s: float | None,
        stopped: Callable[[], bool],
    ) -> None:
        """Runs all streams to their end, or to the first error; cuts those that are silent."""
        silence_s = min(self._chunk_timeout_s, patience_s or self._chunk_timeout_s)
        pending = {pool.submit(stream.run) for stream in streams}
        while pending:
            done, pending = concurrent.futures.wait(
                pending, POLL_S, return_when=concurrent.futures.FIRST_EXCEPTION
            )
            for future in done:
                future.result()
            transfer.check_checksums()
            if stopped():
                raise Unreachable(f"the transfer from {self._peer} was stopped")
            for stream in streams:
                stream.cut_if_silent(silence_s)

    def _answer(self, call: grpc.Future, stopped: Callable[[], bool]):
        """Returns the response of a call, with its errors as those of a transfer."""
        while True:
            try:
                return call.result(timeout=POLL_S)
            except grpc.FutureTimeoutError:
                if stopped():
                    call.cancel()
                    raise Unreachable(f"the request to {self._peer} was stopped") from None
            except grpc.FutureCancelledError as error:
                raise Unreachable(f"{self._peer}: the connection was closed") from error
            except grpc.RpcError as error:
                status = error.code()  # pyright: ignore[reportAttributeAccessIssue]
                held = NotHeld if status is grpc.StatusCode.NOT_FOUND else WeightTransferError
                kind = Unreachable if status in _NO_ANSWER else held
                raise kind(f"{self._peer}: {_status_of(error)}") from error

    @contextlib.contextmanager
    def _blaming_server(self) -> Iterator[None]:
        """Turns a ValueError about an answer into an error that names the server."""
        try:
            yield
        except ValueError as error:
            raise WeightTransferError(f"{self._peer}: {error}") from error


class _Stream:
    """One connection of a transfer: `run` in a thread of its own, the rest from another."""

    def __init__(
        self,
        connect: Callable[[], grpc.Channel],
        request: weights_pb2.FetchWeightsRequest,
        transfer: Transfer,
        deadline: Deadline,
        patience_s: float | None,
    ):
        self._connect = connect
        self._channel = connect()
        self._request = request
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
                        position = self._transfer.write_piece(segment, position, piece)
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
            self._transfer.return_segment(range(position, segment.stop))

    def _open(self, offset: int, length: int) -> Iterator[codec.WeightPiece]:
        request = weights_pb2.FetchWeightsRequest(offset_bytes=offset, length_bytes=length)
        request.MergeFrom(self._request)
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
                f"weight service {self._transfer.source} sent nothing for {quiet_s:.1f} s: "
                f"{_status_of(error)}"
            ) from error
        if self._silent.is_set():
            self._channel.close()  # its connection may be what hangs
            self._channel = self._connect()
            backoff.pause("the connection was silent for too long")
        else:
            backoff.pause_after(error)


def _status_of(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
