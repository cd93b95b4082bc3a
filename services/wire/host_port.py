"""Host and port in one text, as gRPC, Ray and URLs write them: IPv6 addresses have brackets."""


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of `host:port`.

    Raises:
        ValueError: if the text does not end in a port.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not host:port, such as 10.0.0.1:6379 or [::1]:6379")
    return host.removeprefix("[").removesuffix("]"), int(port)
