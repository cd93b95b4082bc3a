"""The socket that a dashboard listens on, and its URL; a driver needs no server to bind it."""

import errno
import os
import socket
from urllib.parse import urlsplit

from services.wire.host_port import join_address
from services.wire.reachable import is_any

DEFAULT_PORT = 8470
BACKLOG = 256
"""Connections that may wait to be accepted."""
DIAL_S = 2.0


class PortTaken(OSError):
    """The address cannot be listened on; the message says why."""


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket.

    Args:
        host: address or name.
        port: None takes DEFAULT_PORT, or a free port if that is taken.

    Raises:
        PortTaken: naming host and port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, DEFAULT_PORT if port is None else port), family=family, backlog=BACKLOG
        )
    except OSError as error:
        if port is None and error.errno in (errno.EADDRINUSE, errno.EACCES):
            return bind(host, 0)
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error)  # an unknown name has no errno
        raise PortTaken(_refused(host, port, reason)) from error
    except (TypeError, ValueError) as error:  # an impossible host name
        raise PortTaken(
            _refused(repr(host[:80]), port, f"it is not a host name ({error})")
        ) from error


def _refused(host: str, port: int | None, reason: str) -> str:
    return f"cannot listen on {host} port {DEFAULT_PORT if port is None else port}: {reason}"


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket for a browser on this host."""
    host, port = listener.getsockname()[:2]
    if is_any(host):
        host = socket.gethostname()
    return f"http://{join_address(host, port)}"


def answers(url: str) -> bool:
    """Whether a server listens at a URL, as seen from this host."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), DIAL_S).close()
    except OSError:
        return False
    return True
