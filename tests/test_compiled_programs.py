"""What a run of the tests keeps of compiled programs for the next one."""

import os
import time
import zlib

import pytest

from tests import compiled_programs


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "cache" / "kept"


def write(folder, name, size=100, age_s=0.0):
    path = folder / f"{name}-cache"
    path.write_bytes(zlib.compress(os.urandom(size)))
    os.utime(path, times=(time.time() - age_s,) * 2)
    return path


def names(folder):
    return sorted(path.name for path in folder.glob("*-cache"))


def test_the_next_run_finds_what_one_compiled(kept):
    first = compiled_programs.start(kept)
    raw = write(first, "a").read_bytes()
    compiled_programs.end(first, kept)
    assert not first.exists()
    second = compiled_programs.start(kept)
    assert (second / "a-cache").read_bytes() == raw


def test_an_entry_whose_writer_was_killed_is_not_kept(kept):
    run = compiled_programs.start(kept)
    whole = write(run, "whole").read_bytes()
    (run / "half-cache").write_bytes(whole[: len(whole) // 2])
    (run / "empty-cache").write_bytes(b"")
    compiled_programs.end(run, kept)
    assert names(kept) == ["whole-cache"]


def test_runs_side_by_side_keep_the_entries_of_both(kept):
    one, other = compiled_programs.start(kept), compiled_programs.start(kept)
    write(one, "a"), write(one, "both"), write(other, "b"), write(other, "both")
    compiled_programs.end(one, kept)
    compiled_programs.end(other, kept)
    assert names(kept) == ["a-cache", "b-cache", "both-cache"]


def test_the_oldest_entries_go_when_they_are_too_many(kept):
    run = compiled_programs.start(kept)
    for age_s, name in enumerate(["new", "middle", "old"]):
        write(run, name, 1000, age_s=age_s * 60)
    compiled_programs.end(run, kept, kept_bytes=2500)
    assert names(kept) == ["middle-cache", "new-cache"]


def test_the_folder_of_a_run_that_was_killed_is_removed_later(kept):
    left, running = compiled_programs.start(kept), compiled_programs.start(kept)
    long_ago = time.time() - compiled_programs.LEFT_BEHIND_S - 1
    os.utime(left, times=(long_ago, long_ago))
    compiled_programs.start(kept)
    assert running.exists() and not left.exists()
