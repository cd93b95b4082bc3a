"""Text on its way to a terminal: a terminal obeys control characters, wherever they come from.

Names, errors and completions may hold whatever a scorer, a model or a data set has written.
"""

import io
import sys
from typing import TextIO

REPLACEMENT = "\ufffd"

_KEPT = "\n\t"
_OBEYED = (
    *range(0x00, 0x20),
    *range(0x7F, 0xA0),
    # Embedding, override and isolation of directions: they show a line in another order.
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
_HARMLESS = {code: REPLACEMENT for code in _OBEYED if chr(code) not in _KEPT}


def harmless(text: str) -> str:
    """The text with control characters replaced, except newlines and tabs."""
    return text.translate(_HARMLESS)


class HarmlessStream(io.TextIOWrapper):
    """Writes text without control characters into the file of another stream.

    A character that the encoding lacks is written as an escape.
    """

    def __init__(self, stream: io.TextIOWrapper):
        stream.flush()
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )
        stream.reconfigure(errors="backslashreplace")
        self.unfiltered: TextIO = stream
        """For what may send control characters, such as a table that draws itself again."""

    def write(self, text: str, /) -> int:
        """Writes the text without its control characters; returns its length."""
        super().write(harmless(text))
        return len(text)


def protect_terminal() -> None:
    """Makes all text of this process harmless: what it prints to stdout and stderr."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, HarmlessStream):
            setattr(sys, name, HarmlessStream(stream))


def unfiltered_stdout() -> TextIO:
    """The stdout that a program which draws on a terminal writes to."""
    return sys.stdout.unfiltered if isinstance(sys.stdout, HarmlessStream) else sys.stdout
