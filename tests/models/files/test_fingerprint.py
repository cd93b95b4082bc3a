"""What tells one model's files from another's."""

import shutil

import pytest

from models.files import fingerprint as module
from models.files.fingerprint import fingerprint
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_copy_has_the_same_and_another_training_another(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert fingerprint(str(copy)) == fingerprint(str(model)) != fingerprint(str(other))


def in_the_config(folder):
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))


def in_the_last_byte(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def in_every_number(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    tensors = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:tensors] + bytes(each ^ 1 for each in content[tensors:]))


@pytest.mark.parametrize("change", [in_the_config, in_the_last_byte, in_every_number])
def test_pieces_that_are_small_beside_the_file_show_a_change(model, tmp_path, monkeypatch, change):
    """As those of a real model are."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 64)
    copy = shutil.copytree(model, tmp_path / "copy")
    assert (copy / "model.safetensors").stat().st_size > 4 * 64 * module._PIECES
    before = fingerprint(str(copy))
    change(copy)
    assert fingerprint(str(copy)) != before


def test_no_model_has_none(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        fingerprint(str(tmp_path / "nowhere"))
