"""The manifest of a checkpoint: what it says is what was written, or it is called damaged."""

import json
import random

import pytest

from learner.durable.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpoint,
    verify_checkpoint,
    write_manifest,
)

TREE = {"['params']['norm']": ["float32", 4], "['opt_state'][0]": ["float32", 8, 4]}
FLIPS, CUTS = 400, 60


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "step-00000001"
    (made / "state" / "deep").mkdir(parents=True)
    (made / "state" / "deep" / "array").write_bytes(bytes(range(256)))
    (made / "record.json").write_text('{"seed": 7}')
    write_manifest(made, 1, TREE)
    return made


def judged(folder, content):
    """The manifest that is read of this content; None where it is called damaged."""
    (folder / MANIFEST).write_bytes(content)
    try:
        return verify_checkpoint(folder)
    except DamagedCheckpoint as reason:
        assert str(reason).startswith("step-00000001: ")
        return None


def test_every_bit_that_flips_is_noticed_or_changes_nothing_R07(folder):
    content = (folder / MANIFEST).read_bytes()
    whole = verify_checkpoint(folder)
    chance = random.Random(7)
    for bit in chance.sample(range(8 * len(content)), FLIPS):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        assert judged(folder, bytes(changed)) in (None, whole), f"bit {bit}"


def test_every_cut_is_noticed_R07(folder):
    content = (folder / MANIFEST).read_bytes()
    for length in random.Random(7).sample(range(len(content)), CUTS):
        assert judged(folder, content[:length]) is None
        zeros = content[:length] + bytes(len(content) - length)
        assert judged(folder, zeros) is None


def keys_of(value):
    if isinstance(value, dict):
        return {*value, *(key for inside in value.values() for key in keys_of(inside))}
    return set()


def test_every_renamed_key_is_noticed_R07(folder):
    content = (folder / MANIFEST).read_text()
    names = keys_of(json.loads(content))
    assert {"checksum", "files", "tree", "step", "bytes", "sha256"} < names
    for name in names:
        changed = content.replace(json.dumps(name) + ":", json.dumps(name + "x") + ":", 1)
        assert changed != content and judged(folder, changed.encode()) is None, name


@pytest.mark.parametrize(
    "content",
    [b"[]", b"null", b"{}", b"[" * 100_000, b"\xff\xfe\x00", b'{"step":1,"files":[],"tree":{}}'],
)
def test_what_is_no_manifest_is_called_damaged(folder, content):
    assert judged(folder, content) is None
