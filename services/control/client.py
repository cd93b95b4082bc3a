"""Asks the driver of a running run to change or describe its rollout workers."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

import grpc

from services.control.messages import (
    Accepted,
    FleetStatus,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    decode_fleet,
)
from services.pb import control_pb2, control_pb2_grpc
from services.wire.channel import Deadline, open_channel
from services.wire.tls import Credentials

_REFUSALS: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.OUT_OF_RANGE: OutOfBounds,
    grpc.StatusCode.NOT_FOUND: NoSuchWorker,
    grpc.StatusCode.FAILED_PRECONDITION: NotNow,
    grpc.StatusCode.PERMISSION_DENIED: PermissionError,
    grpc.StatusCode.ABORTED: TimeoutError,
}

T = TypeVar("T")


class ControlFailed(RuntimeError):
    """The call ended with a status that the protocol does not define."""


class ControlClient:
    """A connection to the driver; a context manager."""

    def __init__(self, address: str, credentials: Credentials):
        """Connects with the first call.

        Args:
            address: `host:port` of the driver's control service.
            credentials: issued to `control` by the authority of the run.
        """
        self._address = address
        self._channel = open_channel(address, credentials)
        self._stub = control_pb2_grpc.ControlServiceStub(self._channel)

    def scale(self, target: int, timeout_s: float) -> Accepted:
        """Asks for a number of rollout workers; returns when the driver has accepted.

        Raises:
            OutOfBounds, NotNow: the driver's refusals.
            PermissionError: if these credentials may not control the run.
            TimeoutError: naming the driver, if it does not answer; whether it received the
                request is unknown.
            ControlFailed: any other status.
        """
        request = control_pb2.ScaleRolloutRequest(target=target)
        response = self._call(
            f"accept a target of {target} workers",
            lambda left_s: self._stub.ScaleRollout(request, timeout=left_s),
            timeout_s,
        )
        return Accepted(target=response.target, current=response.current)

    def drain(self, name: str, timeout_s: float) -> Accepted:
        """Asks to remove one worker; raises NoSuchWorker, and what `scale` raises."""
        request = control_pb2.DrainWorkerRequest(name=name)
        response = self._call(
            f"drain {name}",
            lambda left_s: self._stub.DrainWorker(request, timeout=left_s),
            timeout_s,
        )
        return Accepted(target=response.target, current=response.current)

    def fleet(self, timeout_s: float) -> FleetStatus:
        """Describes the workers; raises what `scale` raises."""
        request = control_pb2.GetFleetRequest()
        response = self._call(
            "describe its workers",
            lambda left_s: self._stub.GetFleet(request, timeout=left_s),
            timeout_s,
        )
        return decode_fleet(response)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _call(self, purpose: str, attempt: Callable[[float], T], timeout_s: float) -> T:
        deadline = Deadline(timeout_s, f"the driver at {self._address} to {purpose}")
        try:
            return deadline.call(attempt)
        except grpc.RpcError as error:
            self._raise_refusal(purpose, error)
        except ValueError as error:  # how gRPC says that another thread has closed the channel
            raise ControlFailed(
                f"the connection to the driver at {self._address} was closed before it could "
                f"{purpose}: {error}"
            ) from error

    def _raise_refusal(self, purpose: str, error: grpc.RpcError) -> NoReturn:
        status = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        details = error.details()  # pyright: ignore[reportAttributeAccessIssue]
        if status in _REFUSALS:
            raise _REFUSALS[status](details) from error
        raise ControlFailed(
            f"the driver at {self._address} did not {purpose}: {status.name}: {details}"
        ) from error
