"""Asks one server for policy versions, and fetches them.

Several connections share a transfer. One that breaks goes on at the first byte it lacks; bytes
that are wrong end the transfer. Nothing of the caller's is touched: it gets a complete verified
version, or an error. `weights/replica.py` goes from one server to the next.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence

import grpc
import numpy as np

from services.pb import weights_pb2, weights_pb2_grpc
from services.weights import codec
from services.weights.buffer_pool import BufferPool
from services.weights.delta import DeltaManifest, check_delta
from services.weights.digest import HASH_THREADS, check_manifest
from services.weights.stream import Stream, Wanted, status_of
from services.weights.transfer import NotHeld, Transfer, Unreachable, WeightTransferError
from services.wire.channel import Deadline, open_channel
from services.wire.messages import WeightManifest
from services.wire.tls import Credentials

POLL_S = 0.1
"""Between two looks at a transfer, and between two questions for a manifest that is not there."""
WAIT_FRACTION = 0.8
"""Share of the time left that the server may hold a question, so that its answer is in time."""

NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
"""What gRPC says where the server said nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a server says of its newest version."""

    manifest: WeightManifest | None
    """None while it is older than was asked for."""
    current_version: int
    depth: int
    """Transfers between the publisher and this server, if there is a manifest."""


def never() -> bool:
    return False


class WeightClient:
    """Connections to one weight service; `ask`, `ask_delta` and `fill` make one attempt each."""

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
        self.address = address
        self._peer = f"weight service {address}"
        self._run_id = run_id
        self._chunk_timeout_s = chunk_timeout_s
        self._streams = streams
        self._pool = BufferPool(keep=1)
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
                response = deadline.call(
                    lambda left_s: self._stub.GetManifest(
                        self._question(min_version, WAIT_FRACTION * left_s), timeout=left_s
                    )
                )
            except grpc.RpcError as error:
                raise WeightTransferError(f"{self._peer}: {status_of(error)}") from error
            answer = self._answer(response, min_version)
            if answer.manifest is not None:
                return answer.manifest
            if deadline.remaining_s() <= POLL_S:
                raise deadline.error(f"the newest is {answer.current_version}")
            time.sleep(POLL_S)

    def ask(
        self,
        min_version: int,
        *,
        wait_s: float,
        timeout_s: float,
        stopped: Callable[[], bool] = never,
    ) -> Answer:
        """Asks once for the newest manifest.

        Args:
            min_version: oldest policy version that helps.
            wait_s: how long the server may hold the question while it has none.
            timeout_s: bound of the whole call.
            stopped: ends the call early, with Unreachable.

        Raises:
            Unreachable: if nobody answered in time.
            WeightTransferError: if the server refuses, or its manifest contradicts itself.
        """
        call = self._stub.GetManifest.future(self._question(min_version, wait_s), timeout=timeout_s)
        return self._answer(self._result(call, stopped), min_version)

    def ask_delta(
        self,
        manifest: WeightManifest,
        base: WeightManifest,
        *,
        wait_s: float,
        timeout_s: float,
        stopped: Callable[[], bool] = never,
    ) -> DeltaManifest | None:
        """Asks once for the delta of a version against one that is held; None if there is none.

        Raises:
            Unreachable: if nobody answered in time.
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
            response = self._result(call, stopped)
        except NotHeld:
            return None
        try:
            delta = codec.decode_delta_manifest(response)
            check_delta(delta, manifest.tensors)
        except ValueError as error:
            raise WeightTransferError(f"{self._peer}: {error}") from error
        return delta

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
        with concurrent.futures.ThreadPoolExecutor(HASH_THREADS) as hashing:
            transfer = Transfer(manifest, self._pool.take(manifest.nbytes), hashing)
            self.fill(transfer, manifest.policy_version, deadline)
            return transfer.finish()

    def fill(
        self,
        transfer: Transfer,
        policy_version: int,
        deadline: Deadline,
        *,
        base_version: int | None = None,
        patience_s: float | None = None,
        stopped: Callable[[], bool] = never,
    ) -> None:
        """Fetches what a transfer lacks; what arrived stays in it if that fails.

        Args:
            transfer: of a version, or of its delta.
            policy_version: which version.
            deadline: of it all.
            base_version: against which the delta was made; None for the version itself.
            patience_s: gives up after so long without a byte; None only at the deadline.
            stopped: ends the transfer early, with Unreachable.

        Raises:
            Unreachable: if the server fell silent, or time ran out.
            WeightTransferError: if it refuses, or sends what is wrong.
        """
        transfer.peer = self._peer
        wanted = Wanted(
            run_id=self._run_id, policy_version=policy_version, base_version=base_version
        )
        with concurrent.futures.ThreadPoolExecutor(self._streams) as pool:
            streams = [
                Stream(self._connect, wanted, transfer, deadline, patience_s)
                for _ in range(self._streams)
            ]
            try:
                self._run(streams, pool, transfer, patience_s, stopped)
            except grpc.RpcError as error:
                raise transfer.error(status_of(error)) from error
            except TimeoutError as error:
                raise Unreachable(str(transfer.error(str(error)))) from error
            finally:
                for stream in streams:
                    stream.stop()

    def close(self) -> None:
        """Ends the connection; a `fetch` opens and closes its own."""
        self._channel.close()

    def _run(
        self,
        streams: Sequence[Stream],
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
            if wrong := transfer.wrong(wait=False):
                raise transfer.error_of(wrong)
            if stopped():
                raise Unreachable(f"the transfer from {self._peer} was stopped")
            for stream in streams:
                stream.cut_if_silent(silence_s)

    def _question(self, min_version: int, wait_s: float) -> weights_pb2.GetManifestRequest:
        return weights_pb2.GetManifestRequest(
            run_id=self._run_id, min_policy_version=min_version, wait_s=wait_s
        )

    def _answer(self, response: weights_pb2.GetManifestResponse, min_version: int) -> Answer:
        manifest = None
        if response.HasField("manifest"):
            try:
                manifest = codec.decode_manifest(response.manifest)
            except ValueError as error:
                raise WeightTransferError(f"{self._peer}: {error}") from error
            self._check(manifest, min_version)
        return Answer(
            manifest=manifest,
            current_version=response.current_policy_version,
            depth=response.relay_depth,
        )

    def _result(self, call: grpc.Future, stopped: Callable[[], bool]):
        while True:
            try:
                return call.result(timeout=POLL_S)
            except grpc.FutureTimeoutError:
                if stopped():
                    call.cancel()
                    raise Unreachable(f"the question to {self._peer} was stopped") from None
            except grpc.FutureCancelledError as error:
                raise Unreachable(f"{self._peer}: the connection was closed") from error
            except grpc.RpcError as error:
                raise self._error_of(error) from error

    def _error_of(self, error: grpc.RpcError) -> WeightTransferError:
        status = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        kind = WeightTransferError
        if status in NO_ANSWER:
            kind = Unreachable
        elif status is grpc.StatusCode.NOT_FOUND:
            kind = NotHeld
        return kind(f"{self._peer}: {status_of(error)}")

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
