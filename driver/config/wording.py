"""Numbers of things in messages."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 worker`, `2 workers`, `1,024 workers`.

    Args:
        plural: of the noun, where it is not formed by an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def say_bytes(count: int) -> str:
    """A number of bytes with its unit, in powers of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
