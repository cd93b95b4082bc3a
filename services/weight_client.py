"""Fetches policy versions from a weight service.

Several connections share a transfer. One that breaks goes on at the first byte it lacks; bytes
that are wrong end the transfer. Nothing of the caller's is touched: it gets a complete verified
version, or an error.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np

from services import codec
from services.channel import Backoff, Deadline, open_channel
from services.digest import HASH_THREADS, check_manifest
from services.messages import WeightManifest
from services.pb import weights_pb2, weights_pb2_grpc
from services.tls import Credentials
from services.weight_transfer import Transfer, WeightTransferError

POLL_S = 0.1
"""Between two looks at a transfer, and between two questions for a manifest that is not there."""
WAIT_FRACTION = 0.8
"""Share of the time left that the server may hold a question, so that its answer is in time."""


class WeightClient:
    """A worker's connections to one weight service."""

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
            address: `host:port` of whoever serves weights.
            credentials: of this process.
            run_id: the run whose versions are wanted.
            streams: connections that share a transfer, >= 1.
            chunk_timeout_s: a connection that is silent for so long is cut, and goes on anew.
        """
        if streams < 1 or not chunk_timeout_s > 0:
            raise ValueError(
                f"streams must be at least 1 and chunk_timeout_s positive, got {streams} and "
                f"{chunk_timeout_s}"
            )
        self._peer = f"weight service {address}"
        self._run_id = run_id
        self._chunk_timeout_s = chunk_timeout_s
        self._streams = streams
        self._connect = lambda: open_channel(address, credentials)
        self._channel = self._connect()
        self._stub = weights_pb2_grpc.WeightServiceStub(self._channel)

    def manifest(self, min_version: int, timeout_s: float) -> WeightManifest:
        """Returns the newest manifest, as soon as it is at least `min_version`.

        Raises:
            TimeoutError: naming the server, if it has no such version in time.
            WeightTransferError: if the server refuses, or its manifest contradicts itself.
        """
        deadline = Deadline(timeout_s, f"policy version >= {min_version} from {self._peer}")
        while True:
            try:
                response = deadline.call(lambda left_s: self._ask(min_version, left_s))
            except grpc.RpcError as error:
                raise WeightTransferError(f"{self._peer}: {_status(error)}") from error
            if response.HasField("manifest"):
                manifest = codec.decode_manifest(response.manifest)
                self._check(manifest, min_version)
                return manifest
            if deadline.remaining_s() <= POLL_S:
                raise deadline.error(f"the newest is {response.current_policy_version}")
            time.sleep(POLL_S)

    def fetch(self, manifest: WeightManifest, timeout_s: float) -> dict[str, np.ndarray]:
        """Fetches and verifies one version.

        Args:
            manifest: as `manifest` returned it.
            timeout_s: for the whole transfer, interruptions included.

        Returns:
            Writable arrays by name: views of one buffer, except where that would misalign them.

        Raises:
            WeightTransferError: naming server and tensor: time ran out, the version is gone, or
                bytes are wrong.
        """
        self._check(manifest, manifest.policy_version)
        deadline = Deadline(
            timeout_s, f"policy version {manifest.policy_version} from {self._peer}"
        )
        with (
            concurrent.futures.ThreadPoolExecutor(self._streams) as pool,
            concurrent.futures.ThreadPoolExecutor(HASH_THREADS) as hashing,
        ):
            transfer = Transfer(manifest, self._peer, hashing)
            streams = [
                _Stream(self._connect, manifest, transfer, deadline) for _ in range(self._streams)
            ]
            try:
                self._run(streams, pool)
            except grpc.RpcError as error:
                raise transfer.error(_status(error)) from error
            except TimeoutError as error:
                raise transfer.error(str(error)) from error
            finally:
                for stream in streams:
                    stream.stop()
            return transfer.finish()

    def close(self) -> None:
        """Ends the connection; a `fetch` opens and closes its own."""
        self._channel.close()

    def _run(self, streams: Sequence["_Stream"], pool: concurrent.futures.Executor) -> None:
        """Runs all streams to their end, or to the first error; cuts those that are silent."""
        pending = {pool.submit(stream.run) for stream in streams}
        while pending:
            done, pending = concurrent.futures.wait(
                pending, POLL_S, return_when=concurrent.futures.FIRST_EXCEPTION
            )
            for future in done:
                future.result()
            for stream in streams:
                stream.cut_if_silent(self._chunk_timeout_s)

    def _ask(self, min_version: int, left_s: float) -> weights_pb2.GetManifestResponse:
        request = weights_pb2.GetManifestRequest(
            run_id=self._run_id, min_policy_version=min_version, wait_s=WAIT_FRACTION * left_s
        )
        return self._stub.GetManifest(request, timeout=left_s)

    def _check(self, manifest: WeightManifest, min_version: int) -> None:
        try:
            check_manifest(manifest)
        except ValueError as error:
            raise WeightTransferError(f"{self._peer}: {error}") from error
        if manifest.run_id != self._run_id or manifest.policy_version < min_version:
            raise WeightTransferError(
                f"{self._peer} offered version {manifest.policy_version} of run "
                f"{manifest.run_id!r}, asked for >= {min_version} of {self._run_id!r}"
            )


class _Stream:
    """One connection's part in a transfer: runs in a thread of its own."""

    def __init__(
        self,
        connect: Callable[[], grpc.Channel],
        manifest: WeightManifest,
        transfer: Transfer,
        deadline: Deadline,
    ):
        self._connect = connect
        self._channel = connect()
        self._manifest = manifest
        self._transfer = transfer
        self._deadline = deadline
        self._stopped = threading.Event()
        self._silent = threading.Event()
        self._call: grpc.Call | None = None
        self._heard_s = 0.0

    def run(self) -> None:
        """Fetches segments until none is left."""
        try:
            while not self._stopped.is_set() and (segment := self._transfer.take_segment()):
                self._fetch(segment)
        finally:
            self._channel.close()

    def stop(self) -> None:
        """Ends `run` early, from another thread."""
        self._stopped.set()
        if (call := self._call) is not None:
            call.cancel()

    def cut_if_silent(self, chunk_timeout_s: float) -> None:
        """Breaks the call, from another thread, if its next piece is overdue."""
        call = self._call
        if call is not None and time.monotonic() - self._heard_s > chunk_timeout_s:
            self._silent.set()
            call.cancel()

    def _fetch(self, segment: range) -> None:
        position = segment.start
        backoff = Backoff(self._deadline)
        while position < segment.stop and not self._stopped.is_set():
            reached = position
            try:
                for piece in self._open(position, segment.stop - position):
                    self._heard_s = time.monotonic()
                    position = self._transfer.write(segment, position, piece)
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

    def _open(self, offset: int, length: int) -> Iterator[codec.Piece]:
        request = weights_pb2.FetchWeightsRequest(
            run_id=self._manifest.run_id,
            policy_version=self._manifest.policy_version,
            offset_bytes=offset,
            length_bytes=length,
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
        if self._silent.is_set():
            self._channel.close()  # its connection may be what hangs
            self._channel = self._connect()
            backoff.pause("the connection was silent for too long")
        else:
            backoff.pause_after(error)


def _status(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
