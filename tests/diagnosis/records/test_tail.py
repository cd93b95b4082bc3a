"""Whole lines of a log, as they come."""

import pytest

from diagnosis.records import tail as tail_module
from diagnosis.records.tail import Tail, TailChange, read_line


@pytest.mark.parametrize("block_bytes", [1, 10, 1000])
def test_lines_of_any_length_come_once_with_their_place(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(tail_module, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "log"
    text = b"\n".join([b"a" * 25, b"", b"b", b"c" * 10, b'{"d": 1}', b""])
    tail, found = Tail(path), []
    for at in range(0, len(text), 7):
        with path.open("ab") as file:
            file.write(text[at : at + 7])
        assert tail.poll() is TailChange.GROWN
        found += tail.lines()
        assert tail.poll() is TailChange.SAME
    assert [line for _, line in found] == [line for line in text.split(b"\n") if line]
    assert all(text[at : at + len(line)] == line for at, line in found)
    at, line = found[-1]
    assert read_line(path, at, len(line)) == {"d": 1}


def test_a_log_that_is_replaced_between_look_and_reading_gives_no_line_of_the_other(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    assert [line for _, line in tail.lines()] == [b"one"]
    with path.open("ab") as file:
        file.write(b"two\n")
    assert tail.poll() is TailChange.GROWN
    (tmp_path / "other").write_bytes(b"three\nfour\nfive\n")
    (tmp_path / "other").replace(path)
    assert list(tail.lines()) == [] and tail.poll() is TailChange.REPLACED
    path.unlink()
    assert list(tail.lines()) == [] and tail.poll() is TailChange.REPLACED
    assert read_line(path, 0, 3) is None
