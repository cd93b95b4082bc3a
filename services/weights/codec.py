"""Manifests, deltas and pieces of weights to protobuf and back. Pure: no sockets, no clocks."""

from collections.abc import Mapping
from typing import NamedTuple

from services.pb import weights_pb2
from services.weights.delta import DeltaKind, DeltaManifest, DeltaTensor
from services.wire.arrays import ID_DTYPE, LOGPROB_DTYPE, from_wire, to_wire
from services.wire.messages import Canary, TensorSpec, WeightManifest

WEIGHT_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
"""Full name of the service, as health checks and method paths spell it."""

_OFFSET_TAG = b"\x08"  # field 1, varint
_DATA_TAG = b"\x12"  # field 2, length-delimited
_VARINT_BYTES = 9  # enough for 63 bits: neither number is ever negative

_DELTA_TO_PB: Mapping[DeltaKind, weights_pb2.DeltaTensor.Kind] = {
    DeltaKind.UNCHANGED: weights_pb2.DeltaTensor.UNCHANGED,
    DeltaKind.SPARSE: weights_pb2.DeltaTensor.SPARSE,
    DeltaKind.FULL: weights_pb2.DeltaTensor.FULL,
}
_DELTA_FROM_PB: Mapping[int, DeltaKind] = {int(kind): name for name, kind in _DELTA_TO_PB.items()}


def encode_manifest(manifest: WeightManifest) -> weights_pb2.WeightManifest:
    """Returns the message that describes a version."""
    return weights_pb2.WeightManifest(
        run_id=manifest.run_id,
        policy_version=manifest.policy_version,
        tensors=[
            weights_pb2.TensorSpec(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.shape,
                offset_bytes=spec.offset,
                size_bytes=spec.nbytes,
                checksum=spec.checksum,
            )
            for spec in manifest.tensors
        ],
        digest=manifest.digest,
        canary=None if manifest.canary is None else _encode_canary(manifest.canary),
    )


def decode_manifest(message: weights_pb2.WeightManifest) -> WeightManifest:
    """Restores a manifest as it was sent; `check_manifest` says whether it is consistent.

    Raises:
        ValueError: if its canary is not one.
    """
    return WeightManifest(
        run_id=message.run_id,
        policy_version=message.policy_version,
        tensors=tuple(
            TensorSpec(
                name=spec.name,
                dtype=spec.dtype,
                shape=tuple(spec.shape),
                offset=spec.offset_bytes,
                nbytes=spec.size_bytes,
                checksum=spec.checksum,
            )
            for spec in message.tensors
        ),
        digest=message.digest,
        canary=_decode_canary(message.canary) if message.HasField("canary") else None,
    )


def encode_delta_manifest(manifest: DeltaManifest) -> weights_pb2.GetDeltaResponse:
    """Returns the message that describes a delta."""
    return weights_pb2.GetDeltaResponse(
        tensors=[
            weights_pb2.DeltaTensor(
                kind=_DELTA_TO_PB[tensor.kind],
                changed=tensor.changed,
                gap_bytes=tensor.gap_bytes,
                size_bytes=tensor.nbytes,
            )
            for tensor in manifest.tensors
        ],
        checksum=manifest.checksum,
    )


def decode_delta_manifest(message: weights_pb2.GetDeltaResponse) -> DeltaManifest:
    """Restores a description as it was sent; `check_delta` says whether it is consistent.

    Raises:
        ValueError: if a tensor's kind is not known.
    """
    unknown = [tensor.kind for tensor in message.tensors if tensor.kind not in _DELTA_FROM_PB]
    if unknown:
        raise ValueError(f"delta kind {unknown[0]} is not one of {sorted(_DELTA_FROM_PB)}")
    return DeltaManifest(
        tensors=tuple(
            DeltaTensor(
                kind=_DELTA_FROM_PB[tensor.kind],
                nbytes=tensor.size_bytes,
                changed=tensor.changed,
                gap_bytes=tensor.gap_bytes,
            )
            for tensor in message.tensors
        ),
        checksum=message.checksum,
    )


class WeightPiece(NamedTuple):
    """The content of a FetchWeightsResponse."""

    offset: int
    """Place of the first byte in the version's byte stream."""
    data: memoryview


def encode_piece(piece: WeightPiece) -> bytes:
    """Serialises a tandem.v1.FetchWeightsResponse, copying its bytes once.

    The generated class copies them three times on this side and twice on the other, which costs
    more than half of all the work of a transfer.
    """
    return b"".join(
        (
            *(_OFFSET_TAG, _varint(piece.offset)),
            *(_DATA_TAG, _varint(len(piece.data)), piece.data),
        )
    )


def decode_piece(raw: bytes) -> WeightPiece:
    """Restores a piece; its data is a view of `raw` if that is laid out as by `encode_piece`.

    Raises:
        DecodeError: if the bytes are not a tandem.v1.FetchWeightsResponse.
    """
    return _view_piece(raw) or _parse_piece(raw)


def _view_piece(raw: bytes) -> WeightPiece | None:
    offset, end = _read_varint(raw, len(_OFFSET_TAG))
    length, start = _read_varint(raw, end + len(_DATA_TAG))
    tags = (raw[: len(_OFFSET_TAG)], raw[end : end + len(_DATA_TAG)])
    if tags != (_OFFSET_TAG, _DATA_TAG) or start + length != len(raw):
        return None
    return WeightPiece(offset, memoryview(raw)[start:])


def _parse_piece(raw: bytes) -> WeightPiece:
    message = weights_pb2.FetchWeightsResponse.FromString(raw)
    return WeightPiece(message.offset_bytes, memoryview(message.data))


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first, the top bit set on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(raw: bytes, start: int) -> tuple[int, int]:
    """Returns the value at `start` and where it ends; nonsense past the end of `raw`."""
    value = 0
    for index, byte in enumerate(raw[start : start + _VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte <= 0x7F:
            return value, start + index + 1
    return value, len(raw)


def _encode_canary(canary: Canary) -> weights_pb2.Canary:
    flat = lambda array, dtype, field: to_wire(array.reshape(-1), dtype, field)
    return weights_pb2.Canary(
        token_ids=flat(canary.token_ids, ID_DTYPE, "token_ids"),
        sequence_tokens=canary.token_ids.shape[1],
        logprobs=flat(canary.logprobs, LOGPROB_DTYPE, "logprobs"),
        fingerprints=flat(canary.fingerprints, LOGPROB_DTYPE, "fingerprints"),
        precision=canary.precision,
    )


def _decode_canary(message: weights_pb2.Canary) -> Canary:
    ids = from_wire(message.token_ids, ID_DTYPE, "token_ids")
    T = message.sequence_tokens
    if T < 2 or len(ids) < T or len(ids) % T:
        raise ValueError(f"{len(ids)} token_ids of a canary are not sequences of {T} tokens")
    B = len(ids) // T
    logprobs = from_wire(message.logprobs, LOGPROB_DTYPE, "logprobs")
    fingerprints = from_wire(message.fingerprints, LOGPROB_DTYPE, "fingerprints")
    if len(logprobs) != B * (T - 1) or not len(fingerprints) or len(fingerprints) % (2 * B):
        raise ValueError(
            f"a canary of {B} sequences of {T} tokens has {len(logprobs)} logprobs and "
            f"{len(fingerprints)} numbers of fingerprints"
        )
    return Canary(
        token_ids=ids.reshape(B, T),
        logprobs=logprobs.reshape(B, T - 1),
        fingerprints=fingerprints.reshape(-1, B, 2),
        precision=message.precision,
    )
