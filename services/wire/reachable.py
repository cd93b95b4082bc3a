"""Which of this host's addresses other hosts connect to."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own host only, however it is spelled."""
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def is_any(host: str) -> bool:
    """Whether listening on an address means all addresses of the host: 0.0.0.0 and `::`."""
    address = _address(host)
    return address is not None and address.is_unspecified


def own_address(towards: str) -> str:
    """The address of this host that another one sees; nothing is sent.

    Args:
        towards: an address or name, without a port and without brackets.
    """
    family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unsent:
        unsent.connect(target)
        return str(unsent.getsockname()[0])


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text spells; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
