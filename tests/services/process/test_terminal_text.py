"""Text of scorers, models and data on its way to a terminal."""

import io
import sys

import pytest

from services.process.terminal_text import (
    HarmlessStream,
    harmless,
    protect_terminal,
    unfiltered_stdout,
)


def stream(encoding="utf-8"):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def written(out):
    out.flush()
    return out.buffer.getvalue()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain \n\t text", "plain \n\t text"),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        ("\x1b]0;title\x07", "\ufffd]0;title\ufffd"),
        ("right\rwrong", "right\ufffdwrong"),
        ("a\x08b\x7f\x00", "a\ufffdb\ufffd\ufffd"),
        ("\x9b2J", "\ufffd2J"),
        ("\u202eabc\u2066", "\ufffdabc\ufffd"),
        ("日本 é \U0001f600", "日本 é \U0001f600"),
    ],
)
def test_control_characters_are_replaced_and_nothing_else(text, shown):
    assert harmless(text) == shown
    out = HarmlessStream(stream())
    assert out.write(text) == len(text)
    assert written(out).decode() == shown


@pytest.mark.parametrize(
    "encoding, text, shown",
    [
        ("ascii", "é 日 \x1b", b"\\xe9 \\u65e5 \\ufffd"),
        ("latin-1", "é 日", b"\xe9 \\u65e5"),
        ("utf-8", "half \ud800", b"half \\ud800"),
    ],
)
def test_what_the_encoding_lacks_is_written_as_an_escape(encoding, text, shown):
    out = HarmlessStream(stream(encoding))
    print(text, end="", file=out)
    assert written(out) == shown


def test_both_streams_of_a_process_are_protected_once(monkeypatch):
    out, err = stream("ascii"), stream("ascii")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    assert unfiltered_stdout() is out
    protect_terminal()
    protect_terminal()
    print("\x1b[31mé")
    print("\x1b[31mé", file=sys.stderr)
    assert unfiltered_stdout() is out, "for a table that draws itself"
    unfiltered_stdout().write("\x1b[31mé\n")
    unfiltered_stdout().flush()
    assert written(out) == b"\\ufffd[31m\\xe9\n\x1b[31m\\xe9\n"
    assert written(err) == b"\\ufffd[31m\\xe9\n"


def test_a_stream_that_is_no_file_stays(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.stderr", io.StringIO())
    protect_terminal()
    assert isinstance(sys.stdout, io.StringIO) and isinstance(sys.stderr, io.StringIO)
