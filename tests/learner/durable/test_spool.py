"""The write-ahead log: whole up to a cut, an error where damaged, each segment on its own."""

import dataclasses
import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from learner.durable import spool as spool_module
from learner.durable.frames import PREFIX_BYTES, DamagedFile
from learner.durable.segment_file import GROUP, NOTHING_OPEN, OpenWork, UpdateRecord
from learner.durable.spool import Spool, SpoolFailed
from services.trajectories import codec
from services.trajectories.id_set import IdSet
from tests.deadlines import HANG_S
from tests.learner.builders import random_groups

GROUPS = random_groups(5)
LARGE = dataclasses.replace(GROUPS[1], prompt_token_ids=np.arange(1, 3001, dtype=np.int32))
"""A record of several sectors of a disk."""


def update(version, *group_ids, dropped=()):
    return UpdateRecord(policy_version=version, group_ids=group_ids, dropped_ids=dropped)


def begun(folder, run_id="run"):
    spool = Spool(folder, run_id)
    spool.rotate(0, lambda: NOTHING_OPEN)
    return spool


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "spool"


def plain(work: OpenWork):
    groups = {name: codec.encode_group(group) for name, group in work.groups.items()}
    return work.issued, work.updates, groups


def test_the_record_of_a_group_is_its_bytes_on_the_wire(folder):
    """So that what keeps those as they were, as for groups of one turn, keeps the log."""
    spool = begun(folder)
    before = sum(path.stat().st_size for path in folder.iterdir())
    spool.write_group(GROUPS[1])
    wire = codec.encode_group(GROUPS[1])
    [path] = folder.glob("*.bin")
    assert path.read_bytes().endswith(GROUP + wire)
    assert path.stat().st_size == before + PREFIX_BYTES + len(GROUP + wire)


def test_what_was_written_is_read_in_its_order_by_the_next_process(folder):
    spool = begun(folder)
    spool.write_issued(0, "d0")
    spool.write_group(GROUPS[1])
    spool.write_group(GROUPS[0])
    spool.write_update(update(1, "g1", "g0", dropped=("g7",)))
    spool.write_issued(1, "d1")
    spool.write_group(GROUPS[2])
    work = Spool(folder, "run").read(0)
    assert work.issued == {0: "d0", 1: "d1"}
    assert work.updates == (update(1, "g1", "g0", dropped=("g7",)),)
    assert list(work.groups) == ["g1", "g0", "g2"]
    for name, group in work.groups.items():
        assert codec.encode_group(group) == codec.encode_group(GROUPS[int(name[1:])])


def test_nothing_is_there_before_the_first_segment(folder):
    spool = Spool(folder, "run")
    assert spool.is_new and spool.read(0) is None and not spool.covers(0)
    with pytest.raises(SpoolFailed, match="no segment of the spool .*spool is open"):
        spool.write_group(GROUPS[0])
    assert not folder.exists()


def test_what_a_checkpoint_has_is_not_open(folder):
    spool = begun(folder)
    for group in GROUPS:
        spool.write_group(group)
    spool.write_update(update(1, "g0"))
    spool.write_update(update(2, "g1"))  # left nothing to train on, and made no version
    spool.write_update(update(2, "g2"))
    work = spool.read(0).beyond(1, IdSet(["g0", "g1"]))
    assert work.updates == (update(2, "g2"),) and list(work.groups) == ["g2", "g3", "g4"]


@pytest.mark.parametrize("cut", [1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 3])
def test_a_last_frame_that_was_cut_is_removed_and_the_spool_continues_there(folder, cut):
    spool = begun(folder)
    spool.write_group(GROUPS[0])
    whole = (folder / "step-00000000.bin").stat().st_size
    spool.write_group(GROUPS[1])
    os.truncate(folder / "step-00000000.bin", whole + cut)
    again = Spool(folder, "run")
    assert list(again.read(0).groups) == ["g0"]
    again.open_last()
    again.write_group(GROUPS[2])
    assert list(Spool(folder, "run").read(0).groups) == ["g0", "g2"]


def test_every_flipped_byte_is_an_error_that_names_file_and_byte(folder):
    spool = begun(folder)
    spool.write_issued(0, "d0")
    start = (folder / "step-00000000.bin").stat().st_size
    spool.write_update(update(1, "g0"))
    end = (folder / "step-00000000.bin").stat().st_size
    spool.write_issued(1, "d1")
    path = folder / "step-00000000.bin"
    content = path.read_bytes()
    for at in range(start, end):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
        with pytest.raises(DamagedFile, match=rf"{path}: record 2 \(byte {start}\) is damaged"):
            Spool(folder, "run").read(0)
    for at in range(start):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
        with pytest.raises(DamagedFile, match=str(path)):
            Spool(folder, "run").read(0)


def test_only_the_last_segment_may_end_inside_a_frame(folder):
    spool = begun(folder)
    spool.write_group(GROUPS[0])
    size = (folder / "step-00000000.bin").stat().st_size
    spool.rotate(5, lambda: NOTHING_OPEN)
    os.truncate(folder / "step-00000000.bin", size - 1)
    with pytest.raises(DamagedFile, match=r"step-00000000.bin: record 1 .* is cut short, and a la"):
        Spool(folder, "run").read(0)
    assert Spool(folder, "run").read(5) == NOTHING_OPEN


def test_a_segment_needs_none_before_it_and_joins_those_it_is_read_with(folder):
    spool = begun(folder)
    for group in GROUPS[:3]:
        spool.write_group(group)
    spool.write_update(update(1, "g0"))
    still_open = OpenWork(
        issued={1: "d1"},
        updates=(update(2, "g1"),),
        groups={"g1": GROUPS[1], "g2": GROUPS[2]},
    )
    spool.rotate(1, lambda: still_open)
    spool.write_group(GROUPS[3])
    spool.write_update(update(3, "g2"))
    alone = Spool(folder, "run").read(1)
    assert alone.updates == (update(2, "g1"), update(3, "g2"))
    assert (list(alone.groups), alone.issued) == (["g1", "g2", "g3"], {1: "d1"})
    joined = Spool(folder, "run").read(0)
    assert joined.updates == (update(1, "g0"), update(2, "g1"), update(3, "g2"))
    assert list(joined.groups) == ["g0", "g1", "g2", "g3"]


def test_a_checkpoint_without_a_segment_of_its_own_is_followed_by_the_one_before(folder):
    spool = begun(folder)
    spool.write_group(GROUPS[0])
    assert list(Spool(folder, "run").read(9).groups) == ["g0"]


def test_another_course_voids_updates_and_versions_from_there_on(folder):
    spool = begun(folder)
    for version in (1, 2, 3):
        spool.write_update(update(version, f"g{version}"))
        spool.write_issued(version, f"d{version}")
    spool.write_abandoned(2)
    spool.write_update(update(2, "g9"))
    work = spool.read(0)
    assert work.updates == (update(1, "g1"), update(2, "g9")) and work.issued == {1: "d1"}


def test_a_resumed_run_that_comes_by_a_step_again_keeps_both_segments(folder):
    spool = begun(folder)
    spool.rotate(2, lambda: NOTHING_OPEN)
    spool.rotate(1, lambda: NOTHING_OPEN)  # step 2 was damaged, the run resumed and saved at 1
    spool.write_group(GROUPS[0])
    spool.rotate(2, lambda: OpenWork(issued={}, updates=(), groups={"g0": GROUPS[0]}))
    spool.write_group(GROUPS[1])
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000000.bin",
        "step-00000001.bin",
        "step-00000002-3.bin",
        "step-00000002.bin",
    ]
    for step in (1, 2):
        assert list(Spool(folder, "run").read(step).groups) == ["g0", "g1"]
    spool.prune(2)
    assert [path.name for path in folder.iterdir()] == ["step-00000002-3.bin"]


def test_pruning_leaves_what_the_oldest_checkpoint_needs(folder):
    spool = begun(folder)
    for step in (10, 20, 30):
        spool.rotate(step, lambda: NOTHING_OPEN)
    spool.prune(25)  # its own segment could not be begun
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000020.bin",
        "step-00000030.bin",
    ]
    assert Spool(folder, "run").covers(25) and not Spool(folder, "run").covers(10)
    spool.prune(10)  # a checkpoint that is kept again, whose segment has gone
    assert len([*folder.iterdir()]) == 2
    spool.write_issued(1, "d")


def test_a_record_that_fails_leaves_no_trace_and_the_next_one_is_whole(folder, monkeypatch):
    spool = begun(folder)
    spool.write_group(GROUPS[0])
    path = folder / "step-00000000.bin"
    before = path.read_bytes()
    write = os.write

    def half(descriptor, data):
        if len(data) > 20:
            return write(descriptor, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(spool_module.os, "write", half)
        with pytest.raises(SpoolFailed, match=f"cannot write to {path}: No space left") as failure:
            spool.write_group(GROUPS[1])
        assert failure.value.errno == 28 and spool.problem == str(failure.value).split("] ")[1]
        assert path.read_bytes() == before
        # Nothing can be taken away either: the remains lie there until the next record.
        patched.setattr(spool_module.os, "ftruncate", lambda *_: half(0, b""))
        with pytest.raises(SpoolFailed):
            spool.write_group(GROUPS[1])
    assert list(Spool(folder, "run").read(0).groups) == ["g0"]
    spool.write_group(GROUPS[2])
    assert spool.problem == "" and list(spool.read(0).groups) == ["g0", "g2"]


def test_a_rotation_that_fails_keeps_the_segment_before_in_use(folder, monkeypatch):
    spool = begun(folder)
    spool.write_group(GROUPS[0])
    with monkeypatch.context() as patched:
        patched.setattr(spool_module.os, "fsync", lambda _: half_full())
        with pytest.raises(SpoolFailed, match="cannot begin .*step-00000003.bin: No space left"):
            spool.rotate(3, lambda: NOTHING_OPEN)
    spool.write_group(GROUPS[1])
    assert [path.name for path in folder.iterdir()] == ["step-00000000.bin"]
    assert list(Spool(folder, "run").read(3).groups) == ["g0", "g1"]


def half_full():
    raise OSError(28, "No space left on device")


def test_only_one_process_writes_and_the_next_waits_for_its_end(folder):
    script = textwrap.dedent(
        """
        import sys
        from learner.durable.spool import Spool
        from learner.durable.segment_file import NOTHING_OPEN

        spool = Spool(sys.argv[1], "run")
        spool.claim()
        spool.rotate(0, lambda: NOTHING_OPEN)
        print("claimed", flush=True)
        sys.stdin.read()
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )
    spool = Spool(folder, "run")
    assert child.stdout.readline() == b"claimed\n"
    with pytest.raises(SpoolFailed, match="spool.lock: another learner of this run has held it"):
        spool.claim(0.1)
    assert spool.is_new, "looked at before the other began"
    ends = threading.Timer(0.3, child.kill)
    ends.start()
    spool.claim(20)
    assert not spool.is_new and spool.problem == ""
    child.wait(HANG_S)
    spool.close()


def test_the_spool_of_another_run_is_refused(folder):
    begun(folder, "run-a")
    with pytest.raises(DamagedFile, match="is of run 'run-a', not 'run-b': give this run another"):
        Spool(folder, "run-b")
    (folder / "step-00000007.bin").write_bytes(b"something else")
    with pytest.raises(DamagedFile, match="step-00000007.bin is no segment of a spool"):
        Spool(folder, "run-a").read(0)


def test_what_was_answered_survives_kill_9_at_any_moment(folder):
    script = textwrap.dedent(
        """
        import sys
        from learner.durable.spool import Spool
        from learner.durable.segment_file import NOTHING_OPEN
        from tests.learner.builders import random_groups
        import dataclasses

        spool = Spool(sys.argv[1], "run")
        spool.rotate(0, lambda: NOTHING_OPEN)
        [group] = random_groups(1)
        for number in range(10**6):
            spool.write_group(dataclasses.replace(group, group_id=f"g{number}"))
            print(number, flush=True)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )
    for _ in range(50):
        assert child.stdout.readline(), "the child died before it was killed"
    child.send_signal(signal.SIGKILL)
    answered = 50 + len(child.stdout.read().split())
    child.wait(HANG_S)
    groups = Spool(folder, "run").read(0).groups
    assert list(groups) == [f"g{number}" for number in range(len(groups))]
    assert len(groups) - answered in (0, 1)


def torn_copy(content, start, how):
    """The content with its last record, which begins at `start`, as a power loss may leave it."""
    if how == "zeros behind it":
        return content[:start] + bytes(4096)
    if how == "half of it":
        return content[: (start + len(content)) // 2]
    first = -(-start // 512) * 512  # of its whole sectors
    if how == "its first sectors are zeros":
        return content[:start] + bytes(first - start) + bytes(1024) + content[first + 1024 :]
    assert how == "its last sectors are zeros"
    last = len(content) // 512 * 512
    return content[:last] + bytes(len(content) - last)


TEARS = ["zeros behind it", "half of it", "its first sectors are zeros"]
TEARS += ["its last sectors are zeros"]


@pytest.mark.parametrize("how", TEARS)
def test_a_tail_that_a_power_loss_tore_is_cut_and_reported_R07(folder, how):
    spool = begun(folder)
    path = folder / "step-00000000.bin"
    spool.write_group(GROUPS[0])
    start = path.stat().st_size
    spool.write_group(LARGE)
    torn = torn_copy(path.read_bytes(), start, how)
    path.write_bytes(torn)
    again = Spool(folder, "run")
    assert list(again.read(0).groups) == ["g0"]
    said = again.open_last()
    assert f"{path}: cut {len(torn) - start} bytes off its end (from byte {start})" in said
    again.write_group(GROUPS[2])
    after = Spool(folder, "run")
    assert list(after.read(0).groups) == ["g0", "g2"] and after.open_last() == ""


def test_damage_in_the_middle_is_refused_and_the_message_has_a_way_on_R07(folder):
    spool = begun(folder)
    path = folder / "step-00000000.bin"
    start = path.stat().st_size
    spool.write_group(LARGE)
    end = path.stat().st_size
    spool.write_issued(0, "d0")
    content = path.read_bytes()
    for at, length in ((start, 2000), (start + PREFIX_BYTES, 600), (end - 700, 700)):
        path.write_bytes(content[:at] + bytes(length) + content[at + length :])
        with pytest.raises(DamagedFile, match=f"damaged.*or move {folder} away and .*--resume"):
            Spool(folder, "run").read(0)


@pytest.mark.parametrize("damaged, blocked", [(0, [0]), (10, [0, 10]), (20, [0, 10, 20])])
def test_a_damaged_header_blocks_only_the_checkpoints_that_need_its_segment(
    folder, damaged, blocked
):
    spool = begun(folder)
    for step in (10, 20):
        spool.rotate(step, lambda: NOTHING_OPEN)
        spool.write_group(GROUPS[step // 10])
    path = folder / f"step-{damaged:08d}.bin"
    content = path.read_bytes()
    path.write_bytes(content[:70] + bytes([content[70] ^ 1]) + content[71:])
    for step in (0, 10, 20):
        again = Spool(folder, "run")
        if step in blocked:
            with pytest.raises(DamagedFile, match=f"{path}: the header .*--resume"):
                again.read(step)
        else:
            assert "g2" in again.read(step).groups
    spool.rotate(30, lambda: NOTHING_OPEN)
    assert spool.prune(30) == [] and Spool(folder, "run").read(30) == NOTHING_OPEN


def test_a_flipped_bit_of_the_last_record_is_no_torn_tail(folder):
    spool = begun(folder)
    path = folder / "step-00000000.bin"
    start = path.stat().st_size
    spool.write_group(LARGE)
    content = path.read_bytes()
    for at in range(start, len(content), 397):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(DamagedFile, match="record 1 .* is damaged"):
            Spool(folder, "run").read(0)


def test_a_segment_whose_folder_cannot_be_synced_hides_nothing_from_a_resume(folder, monkeypatch):
    spool = begun(folder)
    spool.write_group(GROUPS[0])
    with monkeypatch.context() as patched:
        patched.setattr(spool_module, "sync_folder", lambda _: half_full())
        with pytest.raises(SpoolFailed, match="cannot begin .*step-00000003.bin"):
            spool.rotate(3, lambda: NOTHING_OPEN)
    spool.write_group(GROUPS[1])
    assert list(Spool(folder, "run").read(3).groups) == ["g0", "g1"]
    spool.rotate(6, lambda: NOTHING_OPEN)
    assert list(Spool(folder, "run").read(6).groups) == []


def test_what_a_killed_process_had_half_begun_goes_with_the_next_checkpoint(folder):
    spool = begun(folder)
    (folder / ".step-00000003.bin.71-72.part").write_bytes(b"half")
    spool.rotate(3, lambda: NOTHING_OPEN)
    assert spool.prune(3) == []
    assert [path.name for path in folder.iterdir()] == ["step-00000003.bin"]


def test_an_old_segment_that_cannot_be_removed_is_reported(folder, monkeypatch):
    spool = begun(folder)
    spool.rotate(3, lambda: NOTHING_OPEN)

    def busy(self, missing_ok=False):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "unlink", busy)
        [left] = spool.prune(3)
    assert left == f"{folder / 'step-00000000.bin'} cannot be removed: Device or resource busy"
    spool.write_group(GROUPS[0])
    assert list(Spool(folder, "run").read(3).groups) == ["g0"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_other_learner(folder, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", lambda *_: fail(number))
    spool = Spool(folder, "run")
    spool.claim(0.0)
    assert spool.problem == ""
    spool.close()


def test_a_lock_that_cannot_be_asked_for_is_asked_for_again(folder, monkeypatch):
    spool = Spool(folder, "run")
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda *_: fail(errno.EIO))
        with pytest.raises(SpoolFailed, match="Input/output error"):
            spool.claim(0.0)
    other = Spool(folder, "run")
    other.claim(0.0)
    with pytest.raises(SpoolFailed, match="another learner"):
        spool.claim(0.0)
    other.close()


def fail(number):
    raise OSError(number, os.strerror(number))
