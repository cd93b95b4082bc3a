"""The state of a run's rollout workers, refusals to change it, and both as protobuf. Pure."""

import dataclasses
import enum
from typing import Protocol, TypeVar

from services.pb import control_pb2

_Enum = TypeVar("_Enum", bound=enum.Enum)

ERROR_CHARS = 500
"""Characters of a worker's last error that are sent."""


class WorkerState(enum.Enum):
    """As in control.proto."""

    STARTING = "starting"
    READY = "ready"
    WORKING = "working"
    DRAINING = "draining"
    GONE = "gone"


class ScalingPolicy(enum.Enum):
    """As in control.proto."""

    FIXED = "fixed"
    BALANCE = "balance"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One rollout worker, as the driver last saw it; fields as in control.proto."""

    name: str
    state: WorkerState
    policy_version: int = -1
    host: str = ""
    pid: int = 0
    restarts: int = 0
    last_error: str = ""
    groups_leased: int = 0
    groups_done: int = 0
    tokens_per_s: float = 0.0
    slots: int = 0
    address: str = ""
    devices: str = ""
    host_bytes: int = 0
    device_bytes: int = -1
    device_peak_bytes: int = -1
    pull_gb_per_s: float = 0.0

    @property
    def is_serving(self) -> bool:
        """Whether it takes leases."""
        return self.state in (WorkerState.READY, WorkerState.WORKING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerStatus:
    """The learner, as the driver last saw it; fields as in control.proto."""

    doing: str
    policy_version: int = -1
    issued_version: int = -1
    host: str = ""
    pid: int = 0
    devices: str = ""
    restarts: int = 0
    host_bytes: int = 0
    device_bytes: int = -1
    device_peak_bytes: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """All rollout workers of a run, and how many are wanted; fields as in control.proto."""

    target: int
    least: int
    most: int
    policy: ScalingPolicy
    step: int = 0
    policy_version: int = -1
    workers: tuple[WorkerStatus, ...] = ()
    notice: str = ""
    groups_waiting: int = 0
    groups_out: int = 0
    learner: LearnerStatus | None = None

    @property
    def current(self) -> int:
        """Workers that take leases."""
        return sum(worker.is_serving for worker in self.workers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """The answer to a change that will be made."""

    target: int
    current: int


class OutOfBounds(ValueError):
    """More or fewer workers than the run allows."""


class NoSuchWorker(LookupError):
    """No rollout worker has that name."""


class NotNow(RuntimeError):
    """The run cannot do that in the state it is in."""


class ControlHandler(Protocol):
    """What the control service calls in the driver, from several threads at once."""

    def scale(self, target: int, timeout_s: float) -> Accepted:
        """Changes the number of workers wanted.

        Raises:
            OutOfBounds, NotNow: naming the rule.
            TimeoutError: if the driver did not answer in time; nothing will be done then.
        """
        ...

    def drain(self, name: str, timeout_s: float) -> Accepted:
        """Removes one worker after it has finished or returned its work.

        Raises:
            NoSuchWorker, OutOfBounds, NotNow, TimeoutError: as `scale` does.
        """
        ...

    def fleet(self) -> FleetStatus:
        """The workers as the driver last saw them; never waits."""
        ...


_PLAIN_FIELDS = frozenset(field.name for field in dataclasses.fields(WorkerStatus)) - {"state"}
"""Of a worker, that are the same in the message."""


def encode_fleet(fleet: FleetStatus) -> control_pb2.GetFleetResponse:
    """Returns the message that describes the workers; long errors are shortened."""
    return control_pb2.GetFleetResponse(
        target=fleet.target,
        min=fleet.least,
        max=fleet.most,
        policy=fleet.policy.name,
        step=fleet.step,
        policy_version=fleet.policy_version,
        workers=[_encode_worker(worker) for worker in fleet.workers],
        notice=fleet.notice,
        groups_waiting=fleet.groups_waiting,
        groups_out=fleet.groups_out,
        learner=None
        if fleet.learner is None
        else control_pb2.LearnerStatus(**dataclasses.asdict(fleet.learner)),
    )


def decode_fleet(message: control_pb2.GetFleetResponse) -> FleetStatus:
    """The inverse, but for the length of errors.

    Raises:
        ValueError: for a state or policy that this version does not define.
    """
    return FleetStatus(
        target=message.target,
        least=message.min,
        most=message.max,
        policy=_named(ScalingPolicy, control_pb2.GetFleetResponse.Policy, message.policy),
        step=message.step,
        policy_version=message.policy_version,
        workers=tuple(_decode_worker(worker) for worker in message.workers),
        notice=message.notice,
        groups_waiting=message.groups_waiting,
        groups_out=message.groups_out,
        learner=_decode_learner(message.learner) if message.HasField("learner") else None,
    )


def _encode_worker(worker: WorkerStatus) -> control_pb2.WorkerStatus:
    message = control_pb2.WorkerStatus(
        state=worker.state.name,
        last_error=" ".join(worker.last_error[: 2 * ERROR_CHARS].split())[:ERROR_CHARS],
    )
    for name in _PLAIN_FIELDS - {"last_error"}:
        setattr(message, name, getattr(worker, name))
    return message


def _decode_worker(message: control_pb2.WorkerStatus) -> WorkerStatus:
    state = _named(WorkerState, control_pb2.WorkerStatus.State, message.state)
    return WorkerStatus(state=state, **{name: getattr(message, name) for name in _PLAIN_FIELDS})


def _decode_learner(message: control_pb2.LearnerStatus) -> LearnerStatus:
    names = [field.name for field in dataclasses.fields(LearnerStatus)]
    return LearnerStatus(**{name: getattr(message, name) for name in names})


def _named(kind: type[_Enum], numbers, number: int) -> _Enum:
    """The member that has the name of a protobuf enum's number."""
    name = numbers.Name(number) if number in numbers.values() else str(number)
    if name not in kind.__members__:
        raise ValueError(f"{kind.__name__} {name} is unknown: the peer runs another version")
    return kind[name]
