"""Pushes finished groups to the learner."""

import dataclasses
import hashlib
from collections.abc import Iterator

import grpc

from services.pb import trajectories_pb2, trajectories_pb2_grpc
from services.trajectories import codec
from services.trajectories.receipts import StaleGroup, UnknownReceipt
from services.wire.channel import PIECE_BYTES, Backoff, Deadline, open_channel
from services.wire.messages import Group, PushOutcome
from services.wire.tls import Credentials

_REFUSALS: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ValueError,
    grpc.StatusCode.NOT_FOUND: UnknownReceipt,
    grpc.StatusCode.FAILED_PRECONDITION: StaleGroup,
}
_WAITED_FOR = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class PushFailed(RuntimeError):
    """The push ended with a status that the protocol does not define."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedGroup:
    """A group as the bytes that travel."""

    header: trajectories_pb2.PushGroupHeader
    raw: bytes


def pack_group(group: Group) -> PackedGroup:
    """Serialises a group and digests it; `push_group` then only sends."""
    raw = codec.encode_group(group)
    header = trajectories_pb2.PushGroupHeader(
        run_id=group.run_id,
        group_id=group.group_id,
        attempt=group.attempt,
        size_bytes=len(raw),
        sha256=hashlib.sha256(raw).digest(),
    )
    return PackedGroup(header=header, raw=raw)


class TrajectoryClient:
    """A worker's connection to the trajectory service; may be used from several threads."""

    def __init__(self, address: str, credentials: Credentials):
        """Connects with the first call.

        Args:
            address: `host:port` of the learner.
            credentials: of this process.
        """
        self._address = address
        self._channel = open_channel(address, credentials)
        self._stub = trajectories_pb2_grpc.TrajectoryServiceStub(self._channel)

    def push_group(self, packed: PackedGroup, timeout_s: float) -> PushOutcome:
        """Sends a group; repeats are harmless, so UNAVAILABLE is tried again.

        A learner that is away, has no room or whose disk is full is waited for.

        Returns:
            ACCEPTED, or DUPLICATE if the learner had accepted it before.

        Raises:
            TimeoutError: naming learner, group and the last reason; whether it arrived is unknown.
            StaleGroup, UnknownReceipt, ValueError: the learner's refusals, as
                `GroupBuffer.put_group` describes them.
            PushFailed: any other status.
        """
        group_id = packed.header.group_id
        deadline = Deadline(timeout_s, f"learner {self._address} to take group {group_id!r}")
        backoff = Backoff(deadline)  # for both reasons to try again: the error names the last one
        while True:
            try:
                response = self._stub.PushGroup(_requests(packed), timeout=deadline.remaining_s())
            except grpc.RpcError as error:
                self._pause_or_raise(group_id, error, backoff)
            else:
                return codec.decode_outcome(response.outcome)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def _pause_or_raise(self, group_id: str, error: grpc.RpcError, backoff: Backoff) -> None:
        status = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        details = str(error.details())  # pyright: ignore[reportAttributeAccessIssue]
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            backoff.pause(details)
        elif status in _REFUSALS:
            raise _REFUSALS[status](f"learner {self._address}: {details}") from error
        elif status in _WAITED_FOR:
            backoff.pause_after(error)
        else:
            raise PushFailed(
                f"group {group_id!r} to learner {self._address}: {status.name}: {details}"
            ) from error


def _requests(packed: PackedGroup) -> Iterator[trajectories_pb2.PushGroupRequest]:
    yield trajectories_pb2.PushGroupRequest(header=packed.header)
    for start in range(0, len(packed.raw), PIECE_BYTES):
        yield trajectories_pb2.PushGroupRequest(data=packed.raw[start : start + PIECE_BYTES])
