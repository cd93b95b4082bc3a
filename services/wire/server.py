"""One gRPC server for everything that a process offers to the run."""

import concurrent.futures
import socket

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.pb import trajectories_pb2_grpc
from services.trajectories.group_buffer import GroupBuffer
from services.trajectories.service import MAX_GROUP_BYTES, TrajectoryServicer
from services.weights.service import WeightServicer, add_weight_service
from services.weights.store import WeightStore
from services.wire.channel import PIECE_BYTES, SHARED_OPTIONS
from services.wire.codec import TRAJECTORY_SERVICE, WEIGHT_SERVICE
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
    """The server could not listen where it was told to."""


class Server:
    """Listens from construction to `stop`; a context manager."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        weight_store: WeightStore,
        group_buffer: GroupBuffer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        chunk_bytes: int = PIECE_BYTES,
        max_group_bytes: int = MAX_GROUP_BYTES,
    ):
        """Listens at once.

        Args:
            credentials: of this process; peers must show a certificate of the same authority.
            weight_store: served as the weight service.
            group_buffer: served as the trajectory service; None leaves it out, as on every learner
                host but the first.
            host: address to listen on: `0.0.0.0` for all.
            port: 0 takes a free one.
            chunk_bytes: data bytes of one message of a weight stream.
            max_group_bytes: largest serialised group taken in.

        Raises:
            PortUnavailable: naming host and port.
        """
        pool = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(pool, options=SERVER_OPTIONS)
        self._weights = WeightServicer(
            weight_store, chunk_bytes=chunk_bytes, max_waiting=THREADS // 2
        )
        self._health = health.HealthServicer()
        add_weight_service(self._weights, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = ["", WEIGHT_SERVICE]
        if group_buffer is not None:
            trajectories_pb2_grpc.add_TrajectoryServiceServicer_to_server(
                TrajectoryServicer(group_buffer, max_group_bytes=max_group_bytes), self._server
            )
            names.append(TRAJECTORY_SERVICE)
        self.host = host
        self.port = bind_secure(self._server, host, port, credentials)
        self._server.start()
        for name in names:
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    @property
    def address(self) -> str:
        """`host:port` as bound; a server on 0.0.0.0 is dialled by an address of its host."""
        return join_address(self.host, self.port)

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones end for so long, then cancels them."""
        self._health.enter_graceful_shutdown()
        self._weights.close()
        self._server.stop(grace_s).wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.stop(grace_s=0)


def bind_secure(server: grpc.Server, host: str, port: int, credentials: Credentials) -> int:
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


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unavailable(host: str, port: int, reason: str) -> PortUnavailable:
    return PortUnavailable(
        f"cannot listen on {host} port {port}: the address must be one of this host's, and the "
        f"port free (another run may hold it; 0 takes a free one) ({reason})"
    )
