"""Comparing groups to the bit, and breaking connections for real."""

import contextlib
import dataclasses
import itertools
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterable

import numpy as np

from services.weights.client import WeightClient
from services.weights.replica import Replica
from services.weights.service import weight_service
from services.weights.store import WeightStore
from services.wire.messages import Group
from services.wire.server import Server
from tests.services.weights.weight_tools import fetch, newest_manifest


def hold(end: socket.socket) -> None:
    """Leaves the connection open and silent, as a host that hangs."""


def finish(end: socket.socket) -> None:
    """Closes after what was sent, as a process that ends."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def reset(end: socket.socket) -> None:
    """Closes with RST, as a crashed host or a firewall does; what is on its way is lost."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class TcpProxy:
    """Forwards connections to a port, and stops each after a given number of bytes from there.

    `limits` gives one number to every connection, in order; None lets it live. At the limit both
    ends are cut: by `reset`, `finish` or `hold`. Before the first cut, only a connection that got
    past `question_bytes` takes a limit: how many connections a client opens for its questions
    depends on how busy the machine is.
    """

    def __init__(
        self,
        target_port: int,
        limits: Iterable[int | None],
        cut: Callable[[socket.socket], None],
        question_bytes: int = 0,
    ):
        self.target_port = target_port
        self.limits = iter(limits)
        self.reached = threading.Event()
        self.on_limit: Callable[[], None] = lambda: None
        self.forwarded_bytes = 0  # from there
        self.connections = 0
        self._cut = cut
        self._question_bytes = question_bytes
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset_all(self) -> None:
        """Resets every connection there is."""
        for end in self._sockets:
            reset(end)

    def heal(self) -> None:
        """Lets connections live from now on."""
        self.limits = itertools.repeat(None)

    def __enter__(self) -> "TcpProxy":
        return self

    def __exit__(self, *_) -> None:
        self._listener.close()
        self.reset_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                try:
                    server = socket.create_connection(("127.0.0.1", self.target_port))
                except OSError:
                    reset(client)
                    continue
                self._sockets += [client, server]
                asks = self._question_bytes and not self.reached.is_set()
                limit = self._question_bytes if asks else self._next_limit()
                for pipe in (
                    (server, client, limit, bool(asks), True),
                    (client, server, math.inf, False, False),
                ):
                    threading.Thread(target=self._pump, args=pipe, daemon=True).start()

    def _next_limit(self) -> float:
        limit = next(self.limits)
        return math.inf if limit is None else limit

    def _pump(
        self, source: socket.socket, sink: socket.socket, limit: float, asks: bool, counted: bool
    ) -> None:
        sent = 0
        try:
            while sent < limit and (data := source.recv(int(min(limit - sent, 16384)))):
                sink.sendall(data)
                sent += len(data)
                self.forwarded_bytes += len(data) if counted else 0
                if asks and sent >= limit:
                    limit, asks = self._next_limit(), False
        except OSError:
            reset(sink)
            return
        if sent < limit:
            finish(sink)
            return
        self.on_limit()
        self.reached.set()
        self._cut(sink)
        self._cut(source)


def same_group(left: Group, right: Group) -> bool:
    """Equality to the bit, NaN included."""
    return _plain(left) == _plain(right)


def _plain(value):
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return np.float64(value).tobytes() if isinstance(value, float) else value


def serve_for_ever(credentials, run_id, version, tensors, chunk_bytes, ports) -> None:
    """A learner in a process of its own, to be killed: sends its port through the queue."""
    store = WeightStore(run_id, 1)
    store.publish(version, tensors)
    server = Server(credentials, [weight_service(store, chunk_bytes=chunk_bytes)])
    ports.put(server.port)
    threading.Event().wait()


def fetch_for_ever(address, credentials, run_id) -> None:
    """A worker in a process of its own, to be killed in mid-transfer."""
    client = WeightClient(address, credentials, run_id=run_id, streams=1)
    fetch(client, newest_manifest(client, 0, 60), 60)


def relay_for_ever(credentials, run_id, learner_address, chunk_bytes, addresses) -> None:
    """A worker in a process of its own that has a version and serves it, to be killed."""
    replica = Replica(credentials, run_id=run_id, chunk_bytes=chunk_bytes)
    replica.pull(0, [learner_address], 60)
    addresses.put(replica.address)
    threading.Event().wait()
