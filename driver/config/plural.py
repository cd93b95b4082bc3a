"""Numbers of things in messages."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 worker`, `2 workers`, `1,024 workers`.

    Args:
        plural: of the noun, where it is not formed by an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
