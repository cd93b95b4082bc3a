import dataclasses
import hashlib
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.weights.digest import (
    WIRE_DTYPES,
    check_manifest,
    tensor_bytes,
    tree_digest,
    wire_dtype,
)
from services.wire.messages import WeightManifest


def test_digest_is_the_one_that_the_proto_describes():
    one = np.array([1.0, 2.0], np.float32)
    two = np.array([[256]], np.int16)
    specs, digest = tree_digest({"b": one, "a": two})
    sums = [hashlib.sha256(raw).hexdigest() for raw in (b"\0\1", b"\0\0\x80\x3f\0\0\0\x40")]
    assert [spec.name for spec in specs] == ["a", "b"]
    assert [spec.offset for spec in specs] == [0, 2]
    assert [spec.checksum for spec in specs] == sums
    lines = f'["a","int16",[1,1],"{sums[0]}"]\n["b","float32",[2],"{sums[1]}"]\n'
    assert digest == hashlib.sha256(lines.encode()).hexdigest()


def test_digest_sees_name_shape_dtype_and_every_bit():
    tensor = np.arange(6, dtype=np.int16)
    digests = {
        tree_digest(tensors)[1]
        for tensors in (
            {"a": tensor},
            {"b": tensor},
            {"a": tensor.reshape(2, 3)},
            {"a": tensor.view(np.uint16)},
            {"a": tensor.view(ml_dtypes.bfloat16)},
            {"a": np.where(tensor == 3, 7, tensor).astype(np.int16)},
        )
    }
    assert len(digests) == 6


def test_digest_ignores_order_layout_and_who_holds_the_array():
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = tree_digest({"w": matrix, "x": matrix[0]})
    assert tree_digest({"x": matrix[0], "w": matrix}) == expected
    assert tree_digest({"w": np.asfortranarray(matrix), "x": matrix[0]}) == expected
    assert tree_digest({"w": matrix.astype(">f4"), "x": matrix[0]}) == expected
    assert tree_digest({"w": jnp.asarray(matrix), "x": jnp.asarray(matrix[0])}) == expected


def test_live_bfloat16_device_array_gives_the_receipt_of_its_host_copy():
    host = np.array([[1.5, -0.0], [np.inf, 3e-38]], ml_dtypes.bfloat16)
    assert tree_digest({"w": jnp.asarray(host)}) == tree_digest({"w": host})


@given(st.sampled_from(sorted(WIRE_DTYPES)), st.lists(st.integers(0, 3), max_size=3))
def test_bytes_round_trip_through_the_dtype_name(name, shape):
    dtype = wire_dtype(name)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = (np.arange(nbytes) % 2).astype(np.uint8)
    tensor = raw.view(dtype).reshape(shape)
    assert tensor_bytes(tensor).tobytes() == raw.tobytes()
    (spec,), _ = tree_digest({"t": tensor})
    assert (spec.dtype, spec.shape, spec.nbytes) == (name, tuple(shape), nbytes)


@pytest.mark.parametrize("bad", [np.array([None]), np.array(["x"]), np.zeros(1, "V2")])
def test_dtype_that_cannot_travel_is_refused(bad):
    with pytest.raises(ValueError, match="does not travel"):
        tree_digest({"t": bad})


def test_nothing_has_no_digest():
    with pytest.raises(ValueError, match="at least one tensor"):
        tree_digest({})


def test_manifest_that_contradicts_itself_is_refused():
    specs, digest = tree_digest({"a": np.zeros(3, np.int8), "b": np.zeros((2, 2), np.float32)})
    manifest = WeightManifest(run_id="r", policy_version=1, tensors=specs, digest=digest)
    check_manifest(manifest)
    a, b = specs
    wrong = [
        dict(digest="0" * 64),
        dict(tensors=(b, a)),
        dict(tensors=(a, a)),
        dict(tensors=(a,)),
        dict(tensors=(a, dataclasses.replace(b, offset=4))),
        dict(tensors=(a, dataclasses.replace(b, nbytes=15))),
        dict(tensors=(a, dataclasses.replace(b, shape=(-2, -2)))),
        dict(tensors=(a, dataclasses.replace(b, dtype="object"))),
        dict(tensors=(a, dataclasses.replace(b, checksum=a.checksum))),
    ]
    for changes in wrong:
        with pytest.raises(ValueError):
            check_manifest(dataclasses.replace(manifest, **changes))
