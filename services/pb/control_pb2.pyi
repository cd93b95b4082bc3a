from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRolloutRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: int
    def __init__(self, target: _Optional[int] = ...) -> None: ...

class ScaleRolloutResponse(_message.Message):
    __slots__ = ("target", "current")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    target: int
    current: int
    def __init__(self, target: _Optional[int] = ..., current: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("target", "current")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    target: int
    current: int
    def __init__(self, target: _Optional[int] = ..., current: _Optional[int] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("target", "min", "max", "policy", "step", "policy_version", "workers", "notice", "groups_waiting", "groups_out", "learner")
    class Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        POLICY_UNSPECIFIED: _ClassVar[GetFleetResponse.Policy]
        FIXED: _ClassVar[GetFleetResponse.Policy]
        BALANCE: _ClassVar[GetFleetResponse.Policy]
    POLICY_UNSPECIFIED: GetFleetResponse.Policy
    FIXED: GetFleetResponse.Policy
    BALANCE: GetFleetResponse.Policy
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_WAITING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_OUT_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    target: int
    min: int
    max: int
    policy: GetFleetResponse.Policy
    step: int
    policy_version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    notice: str
    groups_waiting: int
    groups_out: int
    learner: LearnerStatus
    def __init__(self, target: _Optional[int] = ..., min: _Optional[int] = ..., max: _Optional[int] = ..., policy: _Optional[_Union[GetFleetResponse.Policy, str]] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., notice: _Optional[str] = ..., groups_waiting: _Optional[int] = ..., groups_out: _Optional[int] = ..., learner: _Optional[_Union[LearnerStatus, _Mapping]] = ...) -> None: ...

class LearnerStatus(_message.Message):
    __slots__ = ("doing", "policy_version", "issued_version", "host", "pid", "devices", "restarts", "host_bytes", "device_bytes", "device_peak_bytes")
    DOING_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ISSUED_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    doing: str
    policy_version: int
    issued_version: int
    host: str
    pid: int
    devices: str
    restarts: int
    host_bytes: int
    device_bytes: int
    device_peak_bytes: int
    def __init__(self, doing: _Optional[str] = ..., policy_version: _Optional[int] = ..., issued_version: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., devices: _Optional[str] = ..., restarts: _Optional[int] = ..., host_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., device_peak_bytes: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "state", "policy_version", "host", "pid", "restarts", "last_error", "groups_leased", "groups_done", "tokens_per_s", "slots", "address", "devices", "host_bytes", "device_bytes", "device_peak_bytes", "pull_gb_per_s")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[WorkerStatus.State]
        STARTING: _ClassVar[WorkerStatus.State]
        READY: _ClassVar[WorkerStatus.State]
        WORKING: _ClassVar[WorkerStatus.State]
        DRAINING: _ClassVar[WorkerStatus.State]
        GONE: _ClassVar[WorkerStatus.State]
    STATE_UNSPECIFIED: WorkerStatus.State
    STARTING: WorkerStatus.State
    READY: WorkerStatus.State
    WORKING: WorkerStatus.State
    DRAINING: WorkerStatus.State
    GONE: WorkerStatus.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    GROUPS_LEASED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: WorkerStatus.State
    policy_version: int
    host: str
    pid: int
    restarts: int
    last_error: str
    groups_leased: int
    groups_done: int
    tokens_per_s: float
    slots: int
    address: str
    devices: str
    host_bytes: int
    device_bytes: int
    device_peak_bytes: int
    pull_gb_per_s: float
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[WorkerStatus.State, str]] = ..., policy_version: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., restarts: _Optional[int] = ..., last_error: _Optional[str] = ..., groups_leased: _Optional[int] = ..., groups_done: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., slots: _Optional[int] = ..., address: _Optional[str] = ..., devices: _Optional[str] = ..., host_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., device_peak_bytes: _Optional[int] = ..., pull_gb_per_s: _Optional[float] = ...) -> None: ...
