"""What crosses between the process that runs tests and the one that runs a completion.

They exchange lines of JSON over two pipes, and plain values in them: what a completion returns is
data, whatever its class, its equality or its text would do. Other objects stay where they are.

Both processes are started without site-packages: this imports the standard library only.
"""

import collections
import decimal
import fractions
import json
import os
from collections.abc import Callable, Collection
from typing import Any, cast

MOST_BYTES = 1 << 24
"""Of one message; a longer one ends the exchange."""
TEXT_CHARS = 300
"""Of the text of an exception."""
SOLUTION = "solution"
"""The module under which tests may import what the completion defines."""
_EXACT = 2**53


class ExchangeEnded(BaseException):
    """The other process has ended, or does not keep to the protocol."""


class Channel:
    """One end of the exchange: requests go out, and callbacks come in while one is pending."""

    def __init__(self, in_fd: int, out_fd: int):
        self._in = os.fdopen(in_fd, "rb")
        self._out_fd = out_fd

    def send(self, message: dict[str, Any]) -> None:
        """Writes one message; raises ExchangeEnded where there is no reader, or it is too long."""
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MOST_BYTES:
            raise ExchangeEnded(f"a message of {len(data)} bytes is too long")
        try:
            while data:
                data = data[os.write(self._out_fd, data) :]
        except OSError as error:
            raise ExchangeEnded("the other process has ended") from error

    def receive(self) -> dict[str, Any]:
        """Waits for one message; raises ExchangeEnded where none comes, or one that is none."""
        try:
            line = self._in.readline(MOST_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError, OSError):
            message = None
        if not isinstance(message, dict):
            raise ExchangeEnded("the completion's process has ended")
        return message


_AS_TEXT: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, lambda value: hex(int(value)), lambda text: int(text, 16)),
    "float": (float, lambda value: repr(float(value)), float),
    "bytes": ((bytes, bytearray), lambda value: bytes(value).hex(), bytes.fromhex),
    "complex": (complex, lambda value: repr(complex(value)), complex),
    "Decimal": (decimal.Decimal, decimal.Decimal.__str__, decimal.Decimal),
    "Fraction": (fractions.Fraction, fractions.Fraction.__str__, fractions.Fraction),
}
"""By name: the types, and how they become text and are made of it. A subclass becomes its type."""
_AS_LIST: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}


class CrossingValues:
    """Values to JSON and back. A list, a text, a number, a boolean or None stands for itself."""

    def __init__(self, namespace: dict[str, Any]):
        self._namespace = namespace
        """Where the classes are found whose objects cross by value."""
        self.shared: set[str] = set()
        """Their names."""

    def encode(self, value: Any) -> Any:
        """The JSON value of a value."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)  # a subclass may have an equality of its own
        if isinstance(value, int) and -_EXACT < int(value) < _EXACT:
            return int(value)
        if isinstance(value, list):
            return [self.encode(one) for one in value]
        for name, (kind, write, _) in _AS_TEXT.items():
            if isinstance(value, kind):
                return {name: write(value)}
        for name, kind in _AS_LIST.items():
            if isinstance(value, kind):
                return {name: list(map(self.encode, cast(Collection, value)))}
        if isinstance(value, dict):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return self.encode(value.item())
        name = type(value).__name__
        if name in self.shared and hasattr(value, "__dict__"):
            fields = {key: self.encode(one) for key, one in vars(value).items()}
            return {"object": name, "fields": fields}
        return self.encode_other(value)

    def encode_other(self, value: Any) -> Any:
        """The JSON value of an object that stays on this side."""
        raise NotImplementedError

    def decode(self, value: Any) -> Any:
        """The value of a JSON value.

        Raises:
            ValueError, TypeError, ArithmeticError: for what `encode` does not make.
        """
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, list):
            return [self.decode(one) for one in value]
        if isinstance(value, dict) and len(value) == 1:
            ((name, inner),) = value.items()
            if name in _AS_TEXT and isinstance(inner, str):
                return _AS_TEXT[name][2](inner)
            if name in _AS_LIST and isinstance(inner, list):
                return _AS_LIST[name](self.decode(one) for one in inner)
        match value:
            case {"dict": list(pairs)}:
                return {self.decode(key): self.decode(one) for key, one in pairs}
            case {"range": [int(), int(), int()] as bounds}:
                return range(*bounds)
            case {"object": str(name), "fields": dict(fields)} if name in self.shared:
                kind = self._namespace[name]
                made = kind.__new__(kind)
                vars(made).update({key: self.decode(one) for key, one in fields.items()})
                return made
        return self.decode_other(value)

    def decode_other(self, value: Any) -> Any:
        """The object that stands for one that stays on the other side."""
        raise ValueError(f"{str(value)[:TEXT_CHARS]} is no value")


def text_of(error: BaseException) -> str:
    """The text of an exception, even if its own `__str__` raises."""
    try:
        return str(error)[:TEXT_CHARS]
    except BaseException:  # foreign code
        return ""
