"""The driver's own gRPC server: lets a person or the dashboard change the number of workers."""

import concurrent.futures
from typing import NoReturn

import grpc

from services.control.messages import (
    ControlHandler,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    encode_fleet,
)
from services.pb import control_pb2, control_pb2_grpc
from services.wire.server import SERVER_OPTIONS, bind_secure, join_address
from services.wire.tls import Credentials

CALLERS = ("control", "driver")
"""Common names of the certificates that may call."""
THREADS = 8
"""Calls served at a time."""
LONGEST_WAIT_S = 60.0
"""For the driver's loop, whatever the caller's deadline."""
WAIT_FRACTION = 0.9
"""Share of the caller's time that the driver may take, so that a refusal is in time."""


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Checks who calls, asks the handler, and maps its errors to status codes."""

    def __init__(self, handler: ControlHandler):
        self._handler = handler

    def ScaleRollout(self, request, context):
        _check_caller(context)
        try:
            accepted = self._handler.scale(request.target, _wait_s(context))
        except (OutOfBounds, NotNow, TimeoutError) as error:
            _abort(context, error)
        return control_pb2.ScaleRolloutResponse(target=accepted.target, current=accepted.current)

    def DrainWorker(self, request, context):
        _check_caller(context)
        try:
            accepted = self._handler.drain(request.name, _wait_s(context))
        except (NoSuchWorker, OutOfBounds, NotNow, TimeoutError) as error:
            _abort(context, error)
        return control_pb2.DrainWorkerResponse(target=accepted.target, current=accepted.current)

    def GetFleet(self, request, context):
        _check_caller(context)
        return encode_fleet(self._handler.fleet())


class ControlServer:
    """Listens from construction to `stop`; a context manager."""

    def __init__(
        self,
        credentials: Credentials,
        handler: ControlHandler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        """Listens at once.

        Args:
            credentials: of the driver; callers must show a certificate of the same authority.
            handler: is asked.
            host: address to listen on.
            port: 0 takes a free one.

        Raises:
            PortUnavailable: naming host and port.
        """
        pool = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._server = grpc.server(pool, options=SERVER_OPTIONS)
        control_pb2_grpc.add_ControlServiceServicer_to_server(
            ControlServicer(handler), self._server
        )
        self.host = host
        self.port = bind_secure(self._server, host, port, credentials)
        self._server.start()

    @property
    def address(self) -> str:
        """`host:port` as bound."""
        return join_address(self.host, self.port)

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones end for so long, then cancels them."""
        self._server.stop(grace_s).wait()

    def __enter__(self) -> "ControlServer":
        return self

    def __exit__(self, *_) -> None:
        self.stop(grace_s=0)


_STATUS: dict[type[Exception], grpc.StatusCode] = {
    OutOfBounds: grpc.StatusCode.OUT_OF_RANGE,
    NoSuchWorker: grpc.StatusCode.NOT_FOUND,
    NotNow: grpc.StatusCode.FAILED_PRECONDITION,
    TimeoutError: grpc.StatusCode.ABORTED,
}


def _abort(context, error: Exception) -> NoReturn:
    context.abort(_STATUS[type(error)], str(error))
    raise AssertionError("abort raises")


def _check_caller(context) -> None:
    """Every process of the run has a certificate that the handshake accepts; few may command."""
    names = [name.decode() for name in context.auth_context().get("x509_common_name", ())]
    if not any(name in CALLERS for name in names):
        context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"the certificate of {', '.join(names) or 'nobody'} may not control the run; those of "
            f"{' and '.join(CALLERS)} may",
        )


def _wait_s(context) -> float:
    remaining_s = context.time_remaining()
    return (
        LONGEST_WAIT_S if remaining_s is None else min(LONGEST_WAIT_S, WAIT_FRACTION * remaining_s)
    )
