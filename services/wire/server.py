"""One gRPC server for everything that a process offers to the run."""

import concurrent.futures
import dataclasses
import socket
from collections.abc import Callable, Sequence
from typing import NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.wire.channel import SHARED_OPTIONS
from services.wire.host_port import join_address
from services.wire.roles import DETAILS_CHARS, RoleCheck, check_listed
from services.wire.tls import Credentials

THREADS = 64
"""Calls served at a time; a weight stream takes one for as long as it runs."""

SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *SHARED_OPTIONS,
    ("grpc.so_reuseport", 0),  # two runs on one port would share each other's calls
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class PortUnavailable(OSError):
    """The server could not listen on its address."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """What a server needs to offer one gRPC service."""

    name: str
    """Full name, such as `tandem.v1.WeightService`, under which health checks find it."""
    register: Callable[[grpc.Server], object]
    """Adds the handlers of the service to a server that has not started."""
    close: Callable[[], None] = lambda: None
    """Ends the calls that the service holds open, now and from now on."""


class Server:
    """Listens from construction to `stop`; a context manager."""

    def __init__(
        self,
        credentials: Credentials,
        services: Sequence[Service],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        threads: int = THREADS,
    ):
        """Listens at once.

        Args:
            credentials: of this process; peers must show a certificate of the same authority,
                and may call what their role allows (roles.py).
            services: to offer, beside the health service.
            host: address to listen on: `0.0.0.0` for all.
            port: 0 takes a free one.
            threads: calls served at a time.

        Raises:
            PortUnavailable: naming host and port.
            ValueError: naming an rpc without roles.
        """
        for service in services:
            check_listed(service.name)
        pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="grpc")
        self._server = grpc.server(pool, interceptors=[RoleCheck()], options=SERVER_OPTIONS)
        self._services = tuple(services)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for service in self._services:
            service.register(self._server)
        self.host = host
        self.port = _bind_secure(self._server, host, port, credentials)
        self._server.start()
        for name in ("", *(service.name for service in self._services)):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    @property
    def address(self) -> str:
        """`host:port` as bound; a server on 0.0.0.0 is dialled by an address of its host."""
        return join_address(self.host, self.port)

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones go on for at most `grace_s`, then cancels them."""
        self._health.enter_graceful_shutdown()
        for service in self._services:
            service.close()
        self._server.stop(grace_s).wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.stop(grace_s=0)


def _bind_secure(server: grpc.Server, host: str, port: int, credentials: Credentials) -> int:
    """Makes a server listen for peers of its run; it takes calls once it is started.

    gRPC may report a failed bind by an error or by port 0.

    Returns:
        The port, which `port=0` leaves to the system.

    Raises:
        PortUnavailable: naming host and port.
    """
    tls = grpc.ssl_server_credentials(
        [(credentials.key_pem, credentials.cert_pem)],
        root_certificates=credentials.ca_pem,
        require_client_auth=True,
    )
    try:
        bound = server.add_secure_port(join_address(_one_address(host), port), tls)
    except (RuntimeError, OSError) as error:
        raise _unavailable(host, port, str(error)) from error
    if bound == 0:
        raise _unavailable(host, port, "the bind failed")
    return bound


def _one_address(host: str) -> str:
    """Resolves a name to one address: of several, gRPC would be content with any that is free."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _unavailable(host: str, port: int, reason: str) -> PortUnavailable:
    return PortUnavailable(
        f"cannot listen on {host} port {port}: the address must be one of this host's, and the "
        f"port free (another run may hold it; 0 takes a free one) ({reason})"
    )


def refuse(context: grpc.ServicerContext, status: grpc.StatusCode, reason: object) -> NoReturn:
    """Ends the call that a servicer handles with a status and a reason."""
    context.abort(status, str(reason)[:DETAILS_CHARS])
    raise AssertionError("abort raises")
