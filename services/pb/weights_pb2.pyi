from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetManifestRequest(_message.Message):
    __slots__ = ("run_id", "min_policy_version", "wait_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    min_policy_version: int
    wait_s: float
    def __init__(self, run_id: _Optional[str] = ..., min_policy_version: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "current_policy_version", "relay_depth")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CURRENT_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELAY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    current_policy_version: int
    relay_depth: int
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., current_policy_version: _Optional[int] = ..., relay_depth: _Optional[int] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("run_id", "policy_version", "tensors", "digest", "canary")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy_version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    digest: str
    canary: Canary
    def __init__(self, run_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., digest: _Optional[str] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("token_ids", "sequence_tokens", "logprobs", "fingerprints", "precision")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    sequence_tokens: int
    logprobs: bytes
    fingerprints: bytes
    precision: str
    def __init__(self, token_ids: _Optional[bytes] = ..., sequence_tokens: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., precision: _Optional[str] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset_bytes", "size_bytes", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset_bytes: int
    size_bytes: int
    checksum: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class FetchWeightsRequest(_message.Message):
    __slots__ = ("run_id", "policy_version", "offset_bytes", "length_bytes", "base_policy_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy_version: int
    offset_bytes: int
    length_bytes: int
    base_policy_version: int
    def __init__(self, run_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ..., base_policy_version: _Optional[int] = ...) -> None: ...

class FetchWeightsResponse(_message.Message):
    __slots__ = ("offset_bytes", "data")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    data: bytes
    def __init__(self, offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetDeltaRequest(_message.Message):
    __slots__ = ("run_id", "policy_version", "base_policy_version", "base_digest", "wait_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy_version: int
    base_policy_version: int
    base_digest: str
    wait_s: float
    def __init__(self, run_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., base_policy_version: _Optional[int] = ..., base_digest: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class GetDeltaResponse(_message.Message):
    __slots__ = ("tensors", "checksum")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[DeltaTensor]
    checksum: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[DeltaTensor, _Mapping]]] = ..., checksum: _Optional[str] = ...) -> None: ...

class DeltaTensor(_message.Message):
    __slots__ = ("kind", "changed", "gap_bytes", "size_bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[DeltaTensor.Kind]
        UNCHANGED: _ClassVar[DeltaTensor.Kind]
        SPARSE: _ClassVar[DeltaTensor.Kind]
        FULL: _ClassVar[DeltaTensor.Kind]
    KIND_UNSPECIFIED: DeltaTensor.Kind
    UNCHANGED: DeltaTensor.Kind
    SPARSE: DeltaTensor.Kind
    FULL: DeltaTensor.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    GAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: DeltaTensor.Kind
    changed: int
    gap_bytes: int
    size_bytes: int
    def __init__(self, kind: _Optional[_Union[DeltaTensor.Kind, str]] = ..., changed: _Optional[int] = ..., gap_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
