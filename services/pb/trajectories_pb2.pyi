from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushGroupRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PushGroupHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PushGroupHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushGroupHeader(_message.Message):
    __slots__ = ("run_id", "group_id", "attempt", "size_bytes", "sha256")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_id: str
    attempt: int
    size_bytes: int
    sha256: bytes
    def __init__(self, run_id: _Optional[str] = ..., group_id: _Optional[str] = ..., attempt: _Optional[int] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class PushGroupResponse(_message.Message):
    __slots__ = ("outcome", "current_policy_version")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[PushGroupResponse.Outcome]
        ACCEPTED: _ClassVar[PushGroupResponse.Outcome]
        DUPLICATE: _ClassVar[PushGroupResponse.Outcome]
    OUTCOME_UNSPECIFIED: PushGroupResponse.Outcome
    ACCEPTED: PushGroupResponse.Outcome
    DUPLICATE: PushGroupResponse.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CURRENT_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    outcome: PushGroupResponse.Outcome
    current_policy_version: int
    def __init__(self, outcome: _Optional[_Union[PushGroupResponse.Outcome, str]] = ..., current_policy_version: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("run_id", "group_id", "attempt", "prompt_id", "epoch", "policy_version", "weight_digest", "worker", "prompt_token_ids", "completions", "phase_s")
    class PhaseSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_id: str
    attempt: int
    prompt_id: int
    epoch: int
    policy_version: int
    weight_digest: str
    worker: str
    prompt_token_ids: bytes
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    phase_s: _containers.ScalarMap[str, float]
    def __init__(self, run_id: _Optional[str] = ..., group_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_id: _Optional[int] = ..., epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., weight_digest: _Optional[str] = ..., worker: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., phase_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("sample_index", "token_ids", "behavior_logprobs", "finish_reason", "rewards", "total_reward", "reward_error", "segment_tokens", "record_starts")
    class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FINISH_REASON_UNSPECIFIED: _ClassVar[Completion.FinishReason]
        STOP: _ClassVar[Completion.FinishReason]
        LENGTH: _ClassVar[Completion.FinishReason]
        ABORTED: _ClassVar[Completion.FinishReason]
    FINISH_REASON_UNSPECIFIED: Completion.FinishReason
    STOP: Completion.FinishReason
    LENGTH: Completion.FinishReason
    ABORTED: Completion.FinishReason
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_ERROR_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECORD_STARTS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: bytes
    behavior_logprobs: bytes
    finish_reason: Completion.FinishReason
    rewards: _containers.ScalarMap[str, float]
    total_reward: float
    reward_error: str
    segment_tokens: _containers.RepeatedScalarFieldContainer[int]
    record_starts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., behavior_logprobs: _Optional[bytes] = ..., finish_reason: _Optional[_Union[Completion.FinishReason, str]] = ..., rewards: _Optional[_Mapping[str, float]] = ..., total_reward: _Optional[float] = ..., reward_error: _Optional[str] = ..., segment_tokens: _Optional[_Iterable[int]] = ..., record_starts: _Optional[_Iterable[int]] = ...) -> None: ...
