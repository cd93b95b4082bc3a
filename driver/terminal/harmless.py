"""A console that draws text without the control characters in it."""

from rich.console import (
    Console,
    ConsoleOptions,
    ConsoleRenderable,
    RenderableType,
    RenderHook,
    RenderResult,
)
from rich.control import Control
from rich.segment import Segment

from services.process.terminal_text import harmless, unfiltered_stdout


class Harmless:
    """Draws something without the control characters in its text: a name or an error that a run
    has written down may contain some. Its colours stay.
    """

    def __init__(self, drawn: RenderableType):
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._drawn, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


class _HarmlessHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [one if isinstance(one, Control) else Harmless(one) for one in renderables]


def harmless_console(*, plain_width: int | None = None) -> Console:
    """A console on stdout that prints nothing but harmless text.

    Args:
        plain_width: columns where the output is no terminal.
    """
    file = unfiltered_stdout()
    return make_harmless(Console(file=file, width=None if file.isatty() else plain_width))


def make_harmless(console: Console) -> Console:
    """Makes harmless whatever this console prints; what a `Live` draws has to be `Harmless`."""
    console.push_render_hook(_HarmlessHook())
    return console
