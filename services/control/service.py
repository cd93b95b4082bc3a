"""What the driver serves over gRPC: a person or the dashboard changes the number of workers."""

import grpc

from services.control.messages import (
    ControlHandler,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    encode_fleet,
)
from services.pb import control_pb2, control_pb2_grpc
from services.wire.server import Service, refuse

THREADS = 8
"""Enough for a server of the driver."""
LONGEST_WAIT_S = 60.0
"""For the driver's loop, whatever the caller's deadline."""
WAIT_FRACTION = 0.9
"""Share of the caller's time that the driver may take, so that a refusal is in time."""


def control_service(handler: ControlHandler) -> Service:
    """Offers a run's driver to those who may control it."""
    servicer = _ControlServicer(handler)
    return Service(
        name=control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
        register=lambda server: control_pb2_grpc.add_ControlServiceServicer_to_server(
            servicer, server
        ),
    )


class _ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Asks the handler, and maps its errors to status codes."""

    def __init__(self, handler: ControlHandler):
        self._handler = handler

    def ScaleRollout(self, request, context):
        try:
            accepted = self._handler.scale(request.target, _wait_s(context))
        except (OutOfBounds, NotNow, TimeoutError) as error:
            refuse(context, _STATUS[type(error)], error)
        return control_pb2.ScaleRolloutResponse(target=accepted.target, current=accepted.current)

    def DrainWorker(self, request, context):
        try:
            accepted = self._handler.drain(request.name, _wait_s(context))
        except (NoSuchWorker, OutOfBounds, NotNow, TimeoutError) as error:
            refuse(context, _STATUS[type(error)], error)
        return control_pb2.DrainWorkerResponse(target=accepted.target, current=accepted.current)

    def GetFleet(self, request, context):
        return encode_fleet(self._handler.fleet())


_STATUS: dict[type[Exception], grpc.StatusCode] = {
    OutOfBounds: grpc.StatusCode.OUT_OF_RANGE,
    NoSuchWorker: grpc.StatusCode.NOT_FOUND,
    NotNow: grpc.StatusCode.FAILED_PRECONDITION,
    TimeoutError: grpc.StatusCode.ABORTED,
}


def _wait_s(context) -> float:
    remaining_s = context.time_remaining()
    return (
        LONGEST_WAIT_S if remaining_s is None else min(LONGEST_WAIT_S, WAIT_FRACTION * remaining_s)
    )
