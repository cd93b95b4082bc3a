"""Asks a server of the run whether it serves."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.wire.channel import Deadline, open_channel
from services.wire.tls import Credentials


class NotServing(RuntimeError):
    """The server answers that it does not serve, or does not have the service."""


def check_serving(
    address: str, credentials: Credentials, *, timeout_s: float, service: str = ""
) -> None:
    """Returns once the server says SERVING.

    Args:
        address: `host:port`.
        credentials: of this process.
        timeout_s: how long the server may take, its start included.
        service: full name, such as `tandem.v1.WeightService`; empty asks for the whole server.

    Raises:
        TimeoutError: naming the server, if it does not answer in time.
        NotServing: if it answers anything else.
    """
    deadline = Deadline(timeout_s, f"the health of the server at {address}")
    request = health_pb2.HealthCheckRequest(service=service)
    with open_channel(address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = deadline.call(lambda left_s: stub.Check(request, timeout=left_s))  # pyright: ignore[reportAttributeAccessIssue]
        except grpc.RpcError as error:
            details = error.details()  # pyright: ignore[reportAttributeAccessIssue]
            raise NotServing(f"server at {address}, service {service!r}: {details}") from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise NotServing(f"server at {address}, service {service!r}: {status}")
