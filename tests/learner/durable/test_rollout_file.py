"""The recorded groups of a run: written step by step, cut by crashes, damaged, gone on with."""

import dataclasses
import errno
import json
import pathlib

import numpy as np
import pytest

from learner.config import AlgorithmConfig, LearnerConfig
from learner.durable.rollout_file import (
    MAGIC,
    DamagedRollouts,
    RecordingFailed,
    RolloutHeader,
    RolloutRecorder,
    read_groups,
    scan_rollouts,
)
from services.trajectories import codec
from services.wire.messages import Group
from tests.learner.builders import make_completion, make_group, random_groups

HEADER = RolloutHeader(
    run_id="run-1",
    seed=7,
    model_path="owner/name",
    model_folder="cache/snapshots/0123abcd",
    algorithm=AlgorithmConfig(kl_coef=0.1),
    learner=LearnerConfig(microbatch_tokens=64),
    temperature=0.8,
    valid_vocab=22,
    max_completion_tokens=16,
    total_steps=10,
)


def as_bytes(groups: list[Group]) -> list[bytes]:
    return [codec.encode_group(group) for group in groups]


def record(path, *versions, header=HEADER, seed=0) -> RolloutRecorder:
    recorder = RolloutRecorder(path, header)
    for version in versions:
        recorder.append(version, random_groups(2, seed=seed + version))
    return recorder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "rollouts.bin"


def test_groups_come_back_in_their_order_with_the_settings_of_the_run(path):
    failed = make_group(9, [3], [make_completion([1, 2], 0.0, error="answer: timed out")])
    batches = [[*reversed(random_groups(3)), failed], random_groups(1, seed=1)]
    recorder = RolloutRecorder(path, HEADER)
    for version, groups in enumerate(batches, 4):
        recorder.append(version, groups)
    contents = scan_rollouts(path)
    assert contents.header == dataclasses.replace(HEADER, first_policy_version=4)
    assert contents.cut_at is None and [place.step for place in contents.places] == [5, 6]
    for groups, place in zip(batches, contents.places, strict=True):
        assert as_bytes(read_groups(path, place)) == as_bytes(groups)


def test_the_header_is_strict_json_that_a_person_can_find(path):
    record(path, 0)
    raw = path.read_bytes()[len(MAGIC) :]
    header = json.loads(raw[44 : 44 + int.from_bytes(raw[:8], "little")])
    assert header["format_version"] == 1 and header["learner"]["microbatch_tokens"] == 64


def test_nothing_is_written_before_the_first_step(path):
    record(path)
    assert not path.exists()


def test_a_file_cut_anywhere_keeps_what_is_whole(path):
    record(path, 0, 1)
    whole, places = path.read_bytes(), scan_rollouts(path).places
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        contents = scan_rollouts(path)
        kept = [place for place in places if place.end <= size]
        assert list(contents.places) == kept
        at_the_end_of_a_frame = size in {places[0].start, *(place.end for place in places)}
        assert (contents.cut_at is None) == at_the_end_of_a_frame


def test_every_flipped_byte_is_found_and_named(path):
    record(path, 0, 1)
    whole, places = path.read_bytes(), scan_rollouts(path).places
    rng = np.random.default_rng(0)
    for position in rng.choice(len(whole), 200, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        records = [n for n, place in enumerate(places, 1) if place.start <= position]
        named = f"record {records[-1]} " if records else "(the header|does not start as one)"
        with pytest.raises(DamagedRollouts, match=named):
            scan_rollouts(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    other = tmp_path / "metrics.jsonl"
    other.write_text('{"step": 1}\n')
    with pytest.raises(DamagedRollouts, match="no file of rollouts"):
        scan_rollouts(other)


def test_a_resumed_run_ends_the_steps_that_it_takes_again(path):
    record(path, 0, 1, 2, 3)
    record(path, 2, seed=50)
    places = scan_rollouts(path).places
    assert [place.step for place in places] == [1, 2, 3]
    assert as_bytes(read_groups(path, places[2])) == as_bytes(random_groups(2, seed=52))


def test_a_resumed_run_continues_after_a_record_that_was_cut(path):
    record(path, 0, 1)
    path.write_bytes(path.read_bytes()[:-5])
    record(path, 1, 2)
    contents = scan_rollouts(path)
    assert [place.step for place in contents.places] == [1, 2, 3] and contents.cut_at is None


@pytest.mark.parametrize("kept", [0, 1])
def test_a_tail_that_a_power_loss_left_as_zeros_is_written_over(path, kept):
    record(path, *range(kept), 1)
    whole = path.read_bytes()
    start = scan_rollouts(path).places[-1].start if kept else 0
    path.write_bytes(whole[:start] + bytes(len(whole) - start))
    assert scan_rollouts(path).cut_at == start
    record(path, 1, 2)
    contents = scan_rollouts(path)
    assert [place.step for place in contents.places][kept:] == [2, 3] and contents.cut_at is None


def test_other_settings_begin_a_new_file_and_keep_the_old_one(path):
    record(path, 0, 1)
    for seed in (8, 9):
        record(path, 1, header=dataclasses.replace(HEADER, seed=seed))
    kept = {file.name: scan_rollouts(file) for file in path.parent.iterdir()}
    assert {name: found.header.seed for name, found in kept.items()} == {
        "rollouts.1.bin": 7,
        "rollouts.2.bin": 8,
        "rollouts.bin": 9,
    }
    assert [place.step for place in kept["rollouts.1.bin"].places] == [1, 2]
    assert kept["rollouts.bin"].header.first_policy_version == 1


def test_a_damaged_file_is_not_gone_on_with(path):
    record(path, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(DamagedRollouts, match="record 1 .*move the file away"):
        RolloutRecorder(path, HEADER)


def test_a_full_disk_is_an_error_that_says_what_to_do(path, monkeypatch):
    recorder = record(path, 0)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", full)
        with pytest.raises(RecordingFailed, match="record step 2 in .*No space left.*--resume"):
            recorder.append(1, random_groups(1))
    recorder.append(1, random_groups(1))
    assert [place.step for place in scan_rollouts(path).places] == [1, 2]
