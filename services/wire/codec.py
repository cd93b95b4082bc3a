"""Messages to protobuf and back. Pure: no sockets, no clocks, no rules of the learner's queue.

Decoding yields fresh writable arrays and turns anything that is not the message into a ValueError.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from services.pb import trajectories_pb2, weights_pb2
from services.weights.delta import DeltaKind, DeltaManifest, DeltaTensor
from services.wire.messages import (
    Canary,
    Completion,
    FinishReason,
    Group,
    PushOutcome,
    TensorSpec,
    WeightManifest,
)

WEIGHT_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
TRAJECTORY_SERVICE = trajectories_pb2.DESCRIPTOR.services_by_name["TrajectoryService"].full_name
"""Full names of the services, as health checks and method paths spell them."""

ID_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")

_OFFSET_TAG = b"\x08"  # field 1, varint
_DATA_TAG = b"\x12"  # field 2, length-delimited
_VARINT_BYTES = 9  # enough for 63 bits: neither number is ever negative

_REASON_TO_PB: Mapping[FinishReason, trajectories_pb2.Completion.FinishReason] = {
    FinishReason.STOP: trajectories_pb2.Completion.STOP,
    FinishReason.LENGTH: trajectories_pb2.Completion.LENGTH,
    FinishReason.ABORTED: trajectories_pb2.Completion.ABORTED,
}
_REASON_FROM_PB = {value: reason for reason, value in _REASON_TO_PB.items()}
_DELTA_TO_PB: Mapping[DeltaKind, weights_pb2.DeltaTensor.Kind] = {
    DeltaKind.UNCHANGED: weights_pb2.DeltaTensor.UNCHANGED,
    DeltaKind.SPARSE: weights_pb2.DeltaTensor.SPARSE,
    DeltaKind.FULL: weights_pb2.DeltaTensor.FULL,
}
_DELTA_FROM_PB: Mapping[int, DeltaKind] = {int(kind): name for name, kind in _DELTA_TO_PB.items()}
_OUTCOME_TO_PB: Mapping[PushOutcome, trajectories_pb2.PushGroupResponse.Outcome] = {
    PushOutcome.ACCEPTED: trajectories_pb2.PushGroupResponse.ACCEPTED,
    PushOutcome.DUPLICATE: trajectories_pb2.PushGroupResponse.DUPLICATE,
}
_OUTCOME_FROM_PB: Mapping[int, PushOutcome] = {
    int(value): outcome for outcome, value in _OUTCOME_TO_PB.items()
}


def encode_group(group: Group) -> bytes:
    """Serialises a group.

    Raises:
        ValueError: if a field does not fit its place on the wire, such as float64 logprobs.
    """
    try:
        message = trajectories_pb2.Group(
            run_id=group.run_id,
            group_id=group.group_id,
            attempt=group.attempt,
            prompt_id=group.prompt_id,
            epoch=group.epoch,
            policy_version=group.policy_version,
            weight_digest=group.weight_digest,
            worker=group.worker,
            prompt_token_ids=_to_wire(group.prompt_token_ids, ID_DTYPE, "prompt_token_ids"),
            completions=[_encode_completion(completion) for completion in group.completions],
            phase_s=group.phase_s,
        )
    except TypeError as error:
        raise ValueError(f"group {group.group_id!r} does not fit on the wire: {error}") from error
    return message.SerializeToString()


def decode_group(raw: bytes | memoryview) -> Group:
    """Restores a group.

    Raises:
        ValueError: if the bytes are not a group.
    """
    try:
        message = trajectories_pb2.Group.FromString(raw)  # pyright: ignore[reportArgumentType]
    except DecodeError as error:
        raise ValueError(f"{len(raw)} bytes are not a tandem.v1.Group: {error}") from error
    return Group(
        run_id=message.run_id,
        group_id=message.group_id,
        attempt=message.attempt,
        prompt_id=message.prompt_id,
        epoch=message.epoch,
        policy_version=message.policy_version,
        weight_digest=message.weight_digest,
        worker=message.worker,
        prompt_token_ids=_from_wire(message.prompt_token_ids, ID_DTYPE, "prompt_token_ids"),
        completions=tuple(_decode_completion(completion) for completion in message.completions),
        phase_s=dict(message.phase_s),
    )


def encode_manifest(manifest: WeightManifest) -> weights_pb2.WeightManifest:
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
    """Restores a manifest as it was sent; `WeightClient` judges whether it makes sense.

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
    """Restores a description as it was sent; `check_delta` judges whether it makes sense.

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


class Piece(NamedTuple):
    """What a FetchWeightsResponse says."""

    offset: int
    """Place of the first byte in the version's byte stream."""
    data: memoryview


def encode_piece(piece: Piece) -> bytes:
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


def decode_piece(raw: bytes) -> Piece:
    """Restores a piece; its data is a view of `raw` if that is laid out as by `encode_piece`.

    Raises:
        DecodeError: if the bytes are not a tandem.v1.FetchWeightsResponse.
    """
    return _view_piece(raw) or _parse_piece(raw)


def encode_outcome(outcome: PushOutcome) -> trajectories_pb2.PushGroupResponse.Outcome:
    return _OUTCOME_TO_PB[outcome]


def decode_outcome(value: int) -> PushOutcome:
    """Raises ValueError if the server answered with an outcome of another version."""
    if value not in _OUTCOME_FROM_PB:
        raise ValueError(f"outcome {value} is not one of {sorted(_OUTCOME_FROM_PB)}")
    return _OUTCOME_FROM_PB[value]


def _view_piece(raw: bytes) -> Piece | None:
    offset, end = _read_varint(raw, len(_OFFSET_TAG))
    length, start = _read_varint(raw, end + len(_DATA_TAG))
    tags = (raw[: len(_OFFSET_TAG)], raw[end : end + len(_DATA_TAG)])
    if tags != (_OFFSET_TAG, _DATA_TAG) or start + length != len(raw):
        return None
    return Piece(offset, memoryview(raw)[start:])


def _parse_piece(raw: bytes) -> Piece:
    message = weights_pb2.FetchWeightsResponse.FromString(raw)
    return Piece(message.offset_bytes, memoryview(message.data))


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
    flat = lambda array, dtype, field: _to_wire(array.reshape(-1), dtype, field)
    return weights_pb2.Canary(
        token_ids=flat(canary.token_ids, ID_DTYPE, "token_ids"),
        sequence_tokens=canary.token_ids.shape[1],
        logprobs=flat(canary.logprobs, LOGPROB_DTYPE, "logprobs"),
        fingerprints=flat(canary.fingerprints, LOGPROB_DTYPE, "fingerprints"),
        precision=canary.precision,
    )


def _decode_canary(message: weights_pb2.Canary) -> Canary:
    ids = _from_wire(message.token_ids, ID_DTYPE, "token_ids")
    T = message.sequence_tokens
    if T < 2 or len(ids) < T or len(ids) % T:
        raise ValueError(f"{len(ids)} token_ids of a canary are not sequences of {T} tokens")
    B = len(ids) // T
    logprobs = _from_wire(message.logprobs, LOGPROB_DTYPE, "logprobs")
    fingerprints = _from_wire(message.fingerprints, LOGPROB_DTYPE, "fingerprints")
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


def _encode_completion(completion: Completion) -> trajectories_pb2.Completion:
    return trajectories_pb2.Completion(
        sample_index=completion.sample_index,
        token_ids=_to_wire(completion.token_ids, ID_DTYPE, "token_ids"),
        behavior_logprobs=_to_wire(
            completion.behavior_logprobs, LOGPROB_DTYPE, "behavior_logprobs"
        ),
        finish_reason=_REASON_TO_PB[completion.finish_reason],
        rewards=completion.rewards,
        total_reward=completion.total_reward,
        reward_error=completion.reward_error,
    )


def _decode_completion(message: trajectories_pb2.Completion) -> Completion:
    if message.finish_reason not in _REASON_FROM_PB:
        raise ValueError(
            f"finish_reason {message.finish_reason} of sample {message.sample_index} is not one "
            f"of {sorted(_REASON_FROM_PB)}"
        )
    return Completion(
        sample_index=message.sample_index,
        token_ids=_from_wire(message.token_ids, ID_DTYPE, "token_ids"),
        behavior_logprobs=_from_wire(message.behavior_logprobs, LOGPROB_DTYPE, "behavior_logprobs"),
        finish_reason=_REASON_FROM_PB[message.finish_reason],
        rewards=dict(message.rewards),
        total_reward=message.total_reward,
        reward_error=message.reward_error,
    )


def _to_wire(array: np.ndarray, dtype: np.dtype, field: str) -> bytes:
    if array.ndim != 1 or array.dtype.newbyteorder("<") != dtype:
        raise ValueError(
            f"{field} must be {dtype.name} of one dimension, got {array.dtype} {array.shape}"
        )
    return array.astype(dtype, copy=False).tobytes()


def _from_wire(raw: bytes, dtype: np.dtype, field: str) -> np.ndarray:
    """Copies, since an array over received bytes would be read-only."""
    if len(raw) % dtype.itemsize:
        raise ValueError(
            f"{field} has {len(raw)} bytes, which is not a multiple of {dtype.itemsize}"
        )
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
