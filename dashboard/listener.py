"""The socket that a dashboard listens on, and its URL; a driver needs no server to bind it."""

import errno
import os
import socket
from urllib.parse import urlsplit

DEFAULT_PORT = 8470
BACKLOG = 256
"""Connections that wait to be accepted, and that are accepted in one go."""
DIAL_S = 2.0


class PortTaken(OSError):
    """Nothing can be listened on there; the message says why."""


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket.

    Args:
        host: address or name.
        port: None takes DEFAULT_PORT, or a free one where that is taken.

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
        reason = os.strerror(number) if number > 0 else str(error)  # a name has no errno
        raise PortTaken(_refused(host, port, reason)) from error
    except (TypeError, ValueError) as error:  # a text that no name could be
        raise PortTaken(_refused(repr(host[:80]), port, f"it is no host name ({error})")) from error


def _refused(host: str, port: int | None, reason: str) -> str:
    return f"cannot listen on {host} port {DEFAULT_PORT if port is None else port}: {reason}"


def url_of(listener: socket.socket) -> str:
    """Where a browser on this host finds it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def answers(url: str) -> bool:
    """Whether somebody listens at a URL, as seen from this host."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), DIAL_S).close()
    except OSError:
        return False
    return True
