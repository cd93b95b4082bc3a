import ml_dtypes
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from services.pb import weights_pb2
from services.weights import codec
from services.weights.digest import tensor_bytes, wire_dtype
from services.wire.messages import Canary, TensorSpec, WeightManifest

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=8)

SPECS = st.builds(
    TensorSpec,
    name=TEXT,
    dtype=TEXT,
    shape=st.lists(INT64, max_size=4).map(tuple),
    offset=INT64,
    nbytes=INT64,
    checksum=TEXT,
)


@given(
    st.builds(
        WeightManifest,
        run_id=TEXT,
        policy_version=INT64,
        tensors=st.lists(SPECS, max_size=3).map(tuple),
        digest=TEXT,
    )
)
def test_manifest_round_trip_is_exact(manifest):
    raw = codec.encode_manifest(manifest).SerializeToString()
    assert codec.decode_manifest(weights_pb2.WeightManifest.FromString(raw)) == manifest


def canary_of(**changes):
    arrays = dict(
        token_ids=np.arange(6, dtype=np.int32).reshape(2, 3),
        logprobs=-np.arange(4, dtype=np.float32).reshape(2, 2),
        fingerprints=np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 3,
    )
    return Canary(**{**arrays, **changes}, precision="bfloat16")


def encoded_manifest(canary):
    manifest = WeightManifest(run_id="r", policy_version=1, tensors=(), digest="", canary=canary)
    return weights_pb2.WeightManifest.FromString(
        codec.encode_manifest(manifest).SerializeToString()
    )


def test_canary_travels_with_the_manifest_and_may_be_absent():
    sent = canary_of()
    received = codec.decode_manifest(encoded_manifest(sent)).canary
    assert received is not None and received.precision == "bfloat16"
    for name in ("token_ids", "logprobs", "fingerprints"):
        array, original = getattr(received, name), getattr(sent, name)
        assert array.dtype == original.dtype
        np.testing.assert_array_equal(array, original)
    assert codec.decode_manifest(encoded_manifest(None)).canary is None


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda pb: setattr(pb, "sequence_tokens", 4), "6 token_ids of a canary"),
        (lambda pb: setattr(pb, "sequence_tokens", 0), "sequences of 0 tokens"),
        (lambda pb: setattr(pb, "token_ids", b""), "0 token_ids"),
        (lambda pb: setattr(pb, "logprobs", bytes(12)), "has 3 logprobs"),
        (lambda pb: setattr(pb, "fingerprints", bytes(20)), "5 numbers of fingerprints"),
        (lambda pb: setattr(pb, "fingerprints", bytes(3)), "not a multiple of 4"),
    ],
)
def test_canary_whose_arrays_do_not_belong_together_is_refused(change, part):
    message = encoded_manifest(canary_of())
    change(message.canary)
    with pytest.raises(ValueError, match=part):
        codec.decode_manifest(message)


@given(st.integers(0, 2**63 - 1), st.binary(max_size=300))
def test_piece_is_the_message_of_the_proto_both_ways(offset, data):
    raw = codec.encode_piece(codec.WeightPiece(offset, memoryview(data)))
    message = weights_pb2.FetchWeightsResponse.FromString(raw)
    assert (message.offset_bytes, message.data) == (offset, data)
    assert codec.decode_piece(raw) == (offset, data)
    assert codec.decode_piece(message.SerializeToString()) == (offset, data)


@given(st.binary(max_size=40))
def test_piece_is_read_as_the_generated_class_reads_it(raw):
    try:
        message = weights_pb2.FetchWeightsResponse.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            codec.decode_piece(raw)
    else:
        assert codec.decode_piece(raw) == (message.offset_bytes, message.data)


def test_g04_bfloat16_keeps_every_bit_and_its_name(cases):
    bits = bytes.fromhex("".join(cases("transfer")["G04"]["input"]["hex_little_endian"]))
    tensor = np.frombuffer(bits, ml_dtypes.bfloat16)
    wire = tensor_bytes(tensor).tobytes()
    back = np.frombuffer(wire, wire_dtype(tensor.dtype.name))
    assert wire == bits
    assert back.dtype == ml_dtypes.bfloat16 and back.tobytes() == bits
    values = back.astype(np.float64)
    assert values[:2] == pytest.approx([1.0, 0.10009766])
    assert np.signbit(values[2]) and np.isnan(values[5])
    assert list(values[3:5]) == [np.inf, -np.inf]
    assert values[6] == pytest.approx(9.18355e-41) and values[7] == 3.3895313892515355e38


def test_piece_is_a_view_of_the_received_message():
    raw = codec.encode_piece(codec.WeightPiece(300, memoryview(b"abc")))
    assert codec.decode_piece(raw).data.obj is raw
