import pytest

from services.process.whole_file import check_writable, whole_file, write_whole


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path, sync):
    path = tmp_path / "a.json"
    write_whole(path, "old", sync=sync)
    with whole_file(path, sync=sync) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old", "readers see no half of it"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_written_as_utf_8_and_bytes_as_they_are(tmp_path):
    write_whole(tmp_path / "text", "ä")
    write_whole(tmp_path / "raw", b"\xff")
    assert (tmp_path / "text").read_bytes() == b"\xc3\xa4"
    assert (tmp_path / "raw").read_bytes() == b"\xff"


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(OSError, match="disk full"), whole_file(path) as file:
        file.write(b"half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name, problem",
    [
        (".", "--out '.*' is a folder: name a file in it"),
        ("no/a.json", "--out .*no/a.json: its folder does not exist: make it first"),
    ],
)
def test_a_file_that_could_not_be_written_is_refused_before(tmp_path, name, problem):
    with pytest.raises(ValueError, match=problem):
        check_writable(tmp_path / name, "--out")
    check_writable(tmp_path / "a.json", "--out")
    assert list(tmp_path.iterdir()) == []
