"""Host and port in one text, as gRPC, Ray and URLs write them: IPv6 addresses have brackets."""

import re

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})")


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of `host:port`.

    Raises:
        ValueError: if the text does not end in a port, or has brackets that do not match.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{address!r} is not host:port, such as 10.0.0.1:6379 or [::1]:6379")
    return found["ipv6"] or found["host"], int(found["port"])
