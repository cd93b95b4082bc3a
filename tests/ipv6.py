"""Whether this machine has IPv6 on loopback, for tests over its sockets."""

import contextlib
import socket

import pytest


def _has_loopback() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as trial:
        trial.bind(("::1", 0))
        return True
    return False


HAS_IPV6 = _has_loopback()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6 loopback")
