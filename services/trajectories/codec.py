"""Groups to protobuf and back. Pure: no sockets, no clocks, no rules of the learner's queue.

Decoding yields fresh writable arrays and turns anything that is not a group into a ValueError.
"""

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from services.pb import trajectories_pb2
from services.wire.arrays import ID_DTYPE, LOGPROB_DTYPE, from_wire, to_wire
from services.wire.messages import Completion, FinishReason, Group, PushOutcome

TRAJECTORY_SERVICE = trajectories_pb2.DESCRIPTOR.services_by_name["TrajectoryService"].full_name
"""Full name of the service, as health checks and method paths spell it."""

_REASON_TO_PB: Mapping[FinishReason, trajectories_pb2.Completion.FinishReason] = {
    FinishReason.STOP: trajectories_pb2.Completion.STOP,
    FinishReason.LENGTH: trajectories_pb2.Completion.LENGTH,
    FinishReason.ABORTED: trajectories_pb2.Completion.ABORTED,
}
_REASON_FROM_PB = {value: reason for reason, value in _REASON_TO_PB.items()}
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
            prompt_token_ids=to_wire(group.prompt_token_ids, ID_DTYPE, "prompt_token_ids"),
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
        prompt_token_ids=from_wire(message.prompt_token_ids, ID_DTYPE, "prompt_token_ids"),
        completions=tuple(_decode_completion(completion) for completion in message.completions),
        phase_s=dict(message.phase_s),
    )


def encode_outcome(outcome: PushOutcome) -> trajectories_pb2.PushGroupResponse.Outcome:
    """Returns the enum value that stands for the outcome."""
    return _OUTCOME_TO_PB[outcome]


def decode_outcome(value: int) -> PushOutcome:
    """Returns the outcome; raises ValueError if this version does not know it."""
    if value not in _OUTCOME_FROM_PB:
        raise ValueError(f"outcome {value} is not one of {sorted(_OUTCOME_FROM_PB)}")
    return _OUTCOME_FROM_PB[value]


def _encode_completion(completion: Completion) -> trajectories_pb2.Completion:
    return trajectories_pb2.Completion(
        sample_index=completion.sample_index,
        token_ids=to_wire(completion.token_ids, ID_DTYPE, "token_ids"),
        behavior_logprobs=to_wire(completion.behavior_logprobs, LOGPROB_DTYPE, "behavior_logprobs"),
        finish_reason=_REASON_TO_PB[completion.finish_reason],
        rewards=completion.rewards,
        total_reward=completion.total_reward,
        reward_error=completion.reward_error,
        segment_tokens=completion.segment_tokens,
        record_starts=completion.record_starts,
    )


def _decode_completion(message: trajectories_pb2.Completion) -> Completion:
    if message.finish_reason not in _REASON_FROM_PB:
        raise ValueError(
            f"finish_reason {message.finish_reason} of sample {message.sample_index} is not one "
            f"of {sorted(_REASON_FROM_PB)}"
        )
    return Completion(
        sample_index=message.sample_index,
        token_ids=from_wire(message.token_ids, ID_DTYPE, "token_ids"),
        behavior_logprobs=from_wire(message.behavior_logprobs, LOGPROB_DTYPE, "behavior_logprobs"),
        finish_reason=_REASON_FROM_PB[message.finish_reason],
        rewards=dict(message.rewards),
        total_reward=message.total_reward,
        reward_error=message.reward_error,
        segment_tokens=tuple(message.segment_tokens),
        record_starts=tuple(message.record_starts),
    )
