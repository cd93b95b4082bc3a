"""Serves the versions of a WeightStore over gRPC."""

import contextlib
import math
import threading

import grpc

from services.pb import weights_pb2, weights_pb2_grpc
from services.process import failpoints
from services.weights import codec
from services.weights.store import HeldVersion, UnknownDelta, UnknownVersion, WeightStore
from services.wire.channel import PIECE_BYTES
from services.wire.server import THREADS, Service, refuse

LONGEST_WAIT_S = 20.0
"""Longest time a GetManifest call is held; callers ask again."""


def weight_service(store: WeightStore, *, chunk_bytes: int = PIECE_BYTES) -> Service:
    """Offers the versions of a store.

    Args:
        store: what is served.
        chunk_bytes: data bytes of one message of a weight stream.
    """
    servicer = _WeightServicer(store, chunk_bytes=chunk_bytes, max_waiting=THREADS // 2)
    return Service(
        name=codec.WEIGHT_SERVICE,
        register=lambda server: _add_to(servicer, server),
        close=servicer.close,
    )


class _WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Decodes, asks the store, and maps its errors to status codes."""

    def __init__(self, store: WeightStore, *, chunk_bytes: int, max_waiting: int):
        """Shares the store with its publisher.

        Args:
            store: what is served.
            chunk_bytes: data bytes of one message of the stream.
            max_waiting: most calls held at a time, fewer than the server has threads;
                the others are answered at once, so that waiting never keeps data from moving.
        """
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._may_wait = threading.BoundedSemaphore(max_waiting)
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends every wait, now and from now on."""
        self._closing.set()
        self._store.wake()

    def GetManifest(self, request, context):
        self._check_run(request.run_id, context)
        if request.min_policy_version < 0 or not 0 <= request.wait_s < math.inf:
            refuse(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "min_policy_version and wait_s must be finite and at least 0, got "
                f"{request.min_policy_version} and {request.wait_s}",
            )
        response = weights_pb2.GetManifestResponse()
        try:
            held = self._wait_for_version(request, context)
        except TimeoutError:
            pass  # no such version yet is an answer, not an error
        else:
            response.manifest.CopyFrom(codec.encode_manifest(held.manifest))
            response.relay_depth = held.depth
        response.current_policy_version = self._store.current_version
        return response

    def FetchWeights(self, request, context):
        self._check_run(request.run_id, context)
        offset = request.offset_bytes
        try:
            data = self._range(request)
        except (UnknownVersion, UnknownDelta) as error:
            refuse(context, grpc.StatusCode.NOT_FOUND, error)
        except ValueError as error:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        for start in range(0, len(data), self._chunk_bytes):
            piece = failpoints.spoiled("weights.serve", data[start : start + self._chunk_bytes])
            self._store.count_egress(len(piece))
            yield codec.WeightPiece(offset + start, piece)

    def GetDelta(self, request, context):
        self._check_run(request.run_id, context)
        if not 0 <= request.wait_s < math.inf:
            refuse(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                f"wait_s must be finite and at least 0, got {request.wait_s}",
            )
        try:
            with self._waiting(request.wait_s) as wait_s:
                delta = self._store.delta(
                    request.policy_version, request.base_policy_version, request.base_digest, wait_s
                )
        except (UnknownVersion, UnknownDelta) as error:
            refuse(context, grpc.StatusCode.NOT_FOUND, error)
        return codec.encode_delta_manifest(delta.manifest)

    def _range(self, request) -> memoryview:
        version, offset, length = (
            request.policy_version,
            request.offset_bytes,
            request.length_bytes,
        )
        if not request.HasField("base_policy_version"):
            return self._store.read(version, offset, length)
        return self._store.read_delta(version, request.base_policy_version, offset, length)

    def _wait_for_version(self, request, context) -> HeldVersion:
        context.add_callback(self._store.wake)
        with self._waiting(request.wait_s) as wait_s:
            return self._store.wait_for_version(
                request.min_policy_version,
                wait_s,
                abandoned=lambda: self._closing.is_set() or not context.is_active(),
            )

    @contextlib.contextmanager
    def _waiting(self, wait_s: float):
        """Yields how long a call may be held: 0 where `max_waiting` calls are held already."""
        waits = self._may_wait.acquire(blocking=False)
        try:
            yield min(wait_s, LONGEST_WAIT_S) if waits else 0.0
        finally:
            if waits:
                self._may_wait.release()

    def _check_run(self, run_id: str, context) -> None:
        if run_id != self._store.run_id:
            refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this server belongs to run {self._store.run_id!r}, the caller to {run_id!r}",
            )


def _add_to(servicer: _WeightServicer, server: grpc.Server) -> None:
    """Registers the servicer as the generated function would, but for the faster piece codec."""
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                codec.WEIGHT_SERVICE,
                {
                    "GetManifest": grpc.unary_unary_rpc_method_handler(
                        servicer.GetManifest,
                        request_deserializer=weights_pb2.GetManifestRequest.FromString,
                        response_serializer=weights_pb2.GetManifestResponse.SerializeToString,
                    ),
                    "GetDelta": grpc.unary_unary_rpc_method_handler(
                        servicer.GetDelta,
                        request_deserializer=weights_pb2.GetDeltaRequest.FromString,
                        response_serializer=weights_pb2.GetDeltaResponse.SerializeToString,
                    ),
                    "FetchWeights": grpc.unary_stream_rpc_method_handler(
                        servicer.FetchWeights,
                        request_deserializer=weights_pb2.FetchWeightsRequest.FromString,
                        response_serializer=codec.encode_piece,
                    ),
                },
            )
        ]
    )
