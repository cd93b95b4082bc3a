"""Comparing groups to the bit, and breaking connections for real."""

import contextlib
import dataclasses
import itertools
import socket
import struct
import threading
from collections.abc import Iterable

import numpy as np

from services.messages import Group


class TcpProxy:
    """Forwards connections to a port, and stops each after a given number of bytes from there.

    `limits` gives one number to every connection, in order; None lets it live. At the limit the
    connection is reset, or with `hold` keeps quiet until the proxy closes.
    """

    def __init__(self, target_port: int, limits: Iterable[int | None], *, hold: bool = False):
        self.target_port = target_port
        self.limits = iter(limits)
        self.reached = threading.Event()
        self.forwarded_bytes = 0
        self.connections = 0
        self._hold = hold
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """Lets connections live from now on."""
        self.limits = itertools.repeat(None)

    def __enter__(self) -> "TcpProxy":
        return self

    def __exit__(self, *_) -> None:
        self._listener.close()
        for end in self._sockets:
            _reset(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                try:
                    server = socket.create_connection(("127.0.0.1", self.target_port))
                except OSError:
                    _reset(client)
                    continue
                self._sockets += [client, server]
                down = (server, client, next(self.limits))
                for pipe in (down, (client, server, None)):
                    threading.Thread(target=self._pump, args=pipe, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            left = limit
            while left != 0 and (data := source.recv(16384 if left is None else min(left, 16384))):
                sink.sendall(data)
                if limit is not None:
                    left -= len(data)
                self.forwarded_bytes += len(data)
            if left == 0:
                self.reached.set()
                if self._hold:
                    return
                _reset(sink)
                _reset(source)
            else:
                sink.shutdown(socket.SHUT_WR)


def _reset(end: socket.socket) -> None:
    """Closes with RST, as a crashed host or a firewall does."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()


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
