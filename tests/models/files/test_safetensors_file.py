import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.files.safetensors_file import map_tensor, read_header, write_file

# 1.0, -0.0, inf, nan, the smallest subnormal, -2.0
BF16_BITS = np.array([0x3F80, 0x8000, 0x7F80, 0x7FC1, 0x0001, 0xC000], np.uint16)


@pytest.fixture
def tensors():
    return {
        "odd": np.arange(3, dtype=np.float16),  # leaves what follows unaligned
        "bits": BF16_BITS.view(ml_dtypes.bfloat16).reshape(2, 3),
        "wide": np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2),
        "none": np.zeros((0, 4), np.float32),
    }


def assert_same(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape
    assert left.tobytes() == right.tobytes()


def test_reads_what_the_safetensors_package_writes(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    header = read_header(path)
    assert set(header) == set(tensors)
    for name, tensor in tensors.items():
        assert_same(map_tensor(header[name]), tensor)


def test_writes_what_the_safetensors_package_reads(tmp_path, tensors):
    path = tmp_path / "a.safetensors"
    write_file(path, tensors.items())
    loaded = load_file(path)
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)


def test_writes_arrays_that_are_not_contiguous(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write_file(tmp_path / "a.safetensors", [("a", array)])
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["a"], array)


def test_mapping_reads_nothing_into_memory_of_its_own(tmp_path, tensors):
    write_file(tmp_path / "a.safetensors", tensors.items())
    mapped = map_tensor(read_header(tmp_path / "a.safetensors")["wide"])
    assert not mapped.flags.owndata and not mapped.flags.writeable


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_a_file_cut_anywhere_is_named(tmp_path, tensors, keep):
    path = tmp_path / "cut.safetensors"
    write_file(path, tensors.items())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        read_header(path)


def test_bytes_after_the_end_are_an_error(tmp_path, tensors):
    path = tmp_path / "long.safetensors"
    write_file(path, tensors.items())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"long\.safetensors is too long"):
        read_header(path)


def raw_file(path, header: bytes, data: bytes = b""):
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "stores w as I64"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "gives w bytes 0..8"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "gives w bytes"),
        ({"dtype": "F32", "shape": [2]}, "describes w wrongly"),
        ({"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}, "describes w wrongly"),
    ],
)
def test_a_header_that_cannot_be_true_names_file_and_tensor(tmp_path, fields, message):
    path = raw_file(tmp_path / "a.safetensors", json.dumps({"w": fields}).encode(), bytes(8))
    with pytest.raises(ValueError, match=rf"a\.safetensors.*{message}"):
        read_header(path)


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xfe"])
def test_a_header_that_is_no_object_names_the_file(tmp_path, header):
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        read_header(raw_file(tmp_path / "a.safetensors", header))
