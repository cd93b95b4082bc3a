"""Which of this host's addresses other hosts connect to."""

import socket

ANY_HOST = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own host only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def own_address(towards: str) -> str:
    """The address of this host that another one sees; nothing is sent.

    Args:
        towards: an address, without a port.
    """
    towards = towards.strip("[]")
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((towards, 9))
        return str(unsent.getsockname()[0])


def host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")
