"""Deltas: exact to the bit, as small as the format allows, and never trusted."""

import dataclasses
import hashlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.weights.delta import (
    BLOCK_ELEMENTS,
    Delta,
    DeltaKind,
    DeltaTooLarge,
    apply_delta,
    check_delta,
    encode_delta,
)
from services.weights.digest import layout, tensor_bytes
from services.wire.messages import TensorSpec

SPECIAL_BITS = np.frombuffer(bytes.fromhex("0000008080ff807fc07f01007fff017f"), "<u2")
"""0, -0, -inf, inf, nan, the smallest subnormal, and nans with a payload, as bfloat16."""


def stream_of(tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[TensorSpec, ...]]:
    specs = layout(tensors)
    return np.concatenate([tensor_bytes(tensors[spec.name]) for spec in specs]), specs


def test_delta_is_what_the_proto_describes():
    old = np.zeros(70_000, np.uint16)
    new = old.copy()
    new[[3, 4, 66_000]] = [7, 8, 9]
    tensors = {"a": np.zeros(2, np.float32), "b": old, "c": np.zeros(2, np.uint8)}
    base, specs = stream_of(tensors)
    target, _ = stream_of(tensors | {"b": new, "c": np.ones(2, np.uint8)})
    delta = encode_delta(base, target, specs)
    # gaps 3, 0 and 65995: the last is 65535 and 460 in two bytes, 258 * 255 and 205 in one
    expected = np.array([3, 0, 65_535, 460, 7, 8, 9], "<u2").tobytes() + b"\1\1"
    assert delta.stream.tobytes() == expected
    assert [tensor.kind for tensor in delta.manifest.tensors] == [
        DeltaKind.UNCHANGED,
        DeltaKind.SPARSE,
        DeltaKind.FULL,
    ]
    sparse = delta.manifest.tensors[1]
    assert (sparse.changed, sparse.gap_bytes, sparse.nbytes) == (3, 2, 14)
    assert delta.manifest.checksum == hashlib.sha256(expected).hexdigest()


def test_close_changes_take_codes_of_one_byte():
    old = np.zeros(10_000, np.uint32)
    new = old.copy()
    new[[0, 254, 510]] = 1  # gaps 0, 253, and 255, which is an escape and 0
    base, specs = stream_of({"a": old})
    delta = encode_delta(base, stream_of({"a": new})[0], specs)
    assert delta.stream.tobytes() == bytes([0, 253, 255, 0]) + b"\1\0\0\0" * 3
    new[9_999] = 1  # 9488 elements further: 38 codes of one byte, or one of two
    delta = encode_delta(base, stream_of({"a": new})[0], specs)
    assert delta.stream.tobytes() == np.array([0, 253, 255, 9488], "<u2").tobytes() + (
        b"\1\0\0\0" * 4
    )


@given(
    dtype=st.sampled_from(["bfloat16", "float8_e5m2", "float32", "float64", "bool", "int8"]),
    size=st.integers(0, 3_000),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    block=st.sampled_from([1, 7, 256, BLOCK_ELEMENTS]),
)
def test_any_change_comes_back_to_the_bit(dtype, size, share, seed, block):
    rng = np.random.default_rng(seed)
    itemsize = {"bfloat16": 2, "float8_e5m2": 1, "float32": 4, "float64": 8}.get(dtype, 1)
    specs = (
        TensorSpec(name="odd", dtype="int8", shape=(3,), offset=0, nbytes=3, checksum=""),
        TensorSpec(
            name="t", dtype=dtype, shape=(size,), offset=3, nbytes=size * itemsize, checksum=""
        ),
    )
    base = rng.integers(0, 256, 3 + size * itemsize, np.uint8)
    target = base.copy()
    changed = rng.random(size) < share
    target[3:].reshape(-1, itemsize)[changed, 0] ^= 0x80
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.weights.delta.BLOCK_ELEMENTS", block)
        delta = encode_delta(base, target, specs)
        made = apply_delta(base, delta, specs)
    assert made.tobytes() == target.tobytes()
    assert delta.nbytes <= len(target)
    assert delta.nbytes <= changed.sum() * (itemsize + 2) + 2 * (size // 65_535)


def test_nan_zero_and_infinity_are_bits_like_any_others():
    old = np.tile(SPECIAL_BITS, 100)
    new = old.copy()
    new[8:16] = np.roll(SPECIAL_BITS, 1)
    as_floats = lambda bits: {"w": bits.view(ml_dtypes.bfloat16)}
    base, specs = stream_of(as_floats(old))
    target, _ = stream_of(as_floats(new))
    delta = encode_delta(base, target, specs)
    assert delta.manifest.tensors[0].changed == (old != new).sum() == 8
    assert apply_delta(base, delta, specs).tobytes() == new.tobytes()
    assert encode_delta(base, base.copy(), specs).nbytes == 0  # nan is what it was


def test_base_is_not_touched_and_out_is_used():
    base, specs = stream_of({"a": np.arange(1000, dtype=np.int32)})
    target = base.copy()
    target[40] ^= 1
    base.flags.writeable = False
    out = np.empty_like(target)
    made = apply_delta(base, encode_delta(base, target, specs), specs, out=out)
    assert made is out and made.tobytes() == target.tobytes()


def test_delta_that_is_too_large_ends_the_work():
    base, specs = stream_of({"a": np.zeros(1000, np.int32), "b": np.zeros(1000, np.int32)})
    with pytest.raises(DeltaTooLarge, match="4000 bytes at tensor 'a' already, more than the 3999"):
        encode_delta(base, base ^ 1, specs, max_bytes=3999)


def test_sizes_that_are_not_those_of_the_specs_are_refused():
    base, specs = stream_of({"a": np.zeros(10, np.int32)})
    delta = encode_delta(base, base ^ 1, specs)
    for call in (
        lambda: encode_delta(base[:-1], base, specs),
        lambda: encode_delta(base, base[:-1], specs),
        lambda: apply_delta(base[:-1], delta, specs),
        lambda: apply_delta(base, dataclasses.replace(delta, stream=delta.stream[:-1]), specs),
        lambda: apply_delta(base, delta, specs * 2),
    ):
        with pytest.raises(ValueError, match="40 bytes|39 bytes|1 tensors, the version 2"):
            call()


def sparse_delta() -> tuple[np.ndarray, tuple[TensorSpec, ...], Delta]:
    old = np.zeros(5000, np.uint16)
    new = old.copy()
    new[[10, 2000, 4999]] = 1
    base, specs = stream_of({"a": old})
    return base, specs, encode_delta(base, stream_of({"a": new})[0], specs)


@pytest.mark.parametrize(
    "changes",
    [
        dict(gap_bytes=4),
        dict(gap_bytes=0),
        dict(changed=0),
        dict(changed=-1),
        dict(changed=5001),
        dict(changed=4),
        dict(nbytes=13),
        dict(nbytes=-1),
        dict(kind=DeltaKind.FULL),
        dict(kind=DeltaKind.UNCHANGED),
    ],
)
def test_description_that_contradicts_itself_is_refused(changes):
    _, specs, delta = sparse_delta()
    wrong = dataclasses.replace(delta.manifest.tensors[0], **changes)
    with pytest.raises(ValueError, match="tensor 'a' contradicts itself"):
        check_delta(dataclasses.replace(delta.manifest, tensors=(wrong,)), specs)


@pytest.mark.parametrize(
    "codes, message",
    [
        ([10, 1989, 2999], "leads beyond its end"),
        ([10, 1989, 65_535], "2 changes, described are 3"),
    ],
)
def test_codes_that_do_not_fit_are_refused(codes, message):
    base, specs, delta = sparse_delta()
    stream = delta.stream.copy()
    stream[:6] = np.array(codes, "<u2").view(np.uint8)
    with pytest.raises(ValueError, match=message):
        apply_delta(base, dataclasses.replace(delta, stream=stream), specs)
