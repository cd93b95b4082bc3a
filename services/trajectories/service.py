"""Takes finished groups over gRPC and offers them to a GroupBuffer."""

import hashlib
from collections.abc import Iterator

import grpc
import numpy as np

from services.pb import trajectories_pb2, trajectories_pb2_grpc
from services.trajectories import codec
from services.trajectories.group_buffer import BufferFull, GroupBuffer, NotStored
from services.trajectories.receipts import NotOpen, StaleGroup, UnknownReceipt
from services.wire.messages import Group, PushOutcome
from services.wire.server import Service, refuse

MAX_GROUP_BYTES = 512 * 2**20


def trajectory_service(buffer: GroupBuffer, *, max_group_bytes: int = MAX_GROUP_BYTES) -> Service:
    """Offers a group buffer to the workers.

    Args:
        buffer: where groups go.
        max_group_bytes: largest serialised group taken in.
    """
    servicer = _TrajectoryServicer(buffer, max_group_bytes)
    return Service(
        name=codec.TRAJECTORY_SERVICE,
        register=lambda server: trajectories_pb2_grpc.add_TrajectoryServiceServicer_to_server(
            servicer, server
        ),
    )


class _TrajectoryServicer(trajectories_pb2_grpc.TrajectoryServiceServicer):
    """Assembles, decodes, offers, and maps refusals to status codes."""

    def __init__(self, buffer: GroupBuffer, max_group_bytes: int):
        self._buffer = buffer
        self._max_group_bytes = max_group_bytes

    def PushGroup(self, request_iterator, context):
        try:
            header = _read_header(request_iterator, self._max_group_bytes)
            if self._buffer.put_duplicate(header.run_id, header.group_id):
                return self._response(PushOutcome.DUPLICATE)
            group = _read_group(header, request_iterator)
        except ValueError as error:
            self._buffer.put_malformed()
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except NotStored as error:
            refuse(context, grpc.StatusCode.UNAVAILABLE, error)
        try:
            outcome = self._buffer.put_group(group)
        except ValueError as error:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except UnknownReceipt as error:
            refuse(context, grpc.StatusCode.NOT_FOUND, error)
        except StaleGroup as error:
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, error)
        except BufferFull as error:
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error)
        except (NotStored, NotOpen) as error:
            refuse(context, grpc.StatusCode.UNAVAILABLE, error)
        return self._response(outcome)

    def _response(self, outcome: PushOutcome) -> trajectories_pb2.PushGroupResponse:
        return trajectories_pb2.PushGroupResponse(
            outcome=codec.encode_outcome(outcome),
            current_policy_version=self._buffer.current_version,
        )


def _read_header(
    requests: Iterator[trajectories_pb2.PushGroupRequest], max_group_bytes: int
) -> trajectories_pb2.PushGroupHeader:
    """Returns the header of a push.

    Raises:
        ValueError: if the first message is no header, or announces a group that is too large.
    """
    first = next(requests, None)
    if first is None or first.WhichOneof("part") != "header":
        raise ValueError("the first message of a push must be its header")
    if not 0 < first.header.size_bytes <= max_group_bytes:
        raise ValueError(
            f"a group may have 1 to {max_group_bytes} bytes, got {first.header.size_bytes}"
        )
    return first.header


def _read_group(
    header: trajectories_pb2.PushGroupHeader,
    requests: Iterator[trajectories_pb2.PushGroupRequest],
) -> Group:
    """Returns the group whose pieces follow the header.

    Raises:
        ValueError: if the pieces are not the group that the header announced.
    """
    where = f"push of group {header.group_id!r}"
    raw = np.empty(header.size_bytes, np.uint8).data  # costs memory only as it fills
    received = 0
    for request in requests:
        piece = request.data
        if request.WhichOneof("part") != "data" or not piece:
            raise ValueError(f"{where}: every message after the header must carry data")
        if received + len(piece) > len(raw):
            raise ValueError(f"{where}: more than the {len(raw)} bytes announced")
        raw[received : received + len(piece)] = piece
        received += len(piece)
    if received != len(raw):
        raise ValueError(f"{where}: {received} bytes came, {len(raw)} were announced")
    if hashlib.sha256(raw).digest() != header.sha256:
        raise ValueError(f"{where}: the bytes do not match the sha256 announced")
    group = codec.decode_group(raw)
    announced = (header.run_id, header.group_id, header.attempt)
    if (group.run_id, group.group_id, group.attempt) != announced:
        raise ValueError(
            f"{where}: the header announces (run, group, attempt) {announced}, "
            "the group has another"
        )
    return group
