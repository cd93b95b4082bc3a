"""What the driver sends to a rollout worker, and what the worker reports back.

Small records of plain values, carried by Ray calls.
"""

import dataclasses
import datetime
import enum
from collections.abc import Sequence

from models.adapter import AdapterShape
from rollout_worker.config.data_config import DataConfig
from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.config.reward_config import RewardConfig
from rollout_worker.config.rollout_config import RolloutConfig
from rollout_worker.data.data_digests import DataDigests
from rollout_worker.engine.decode_request import SamplingSettings
from rollout_worker.environments.environment_use import NO_USE, EnvironmentUse
from rollout_worker.rewards.spending import NOTHING, Spending
from rollout_worker.sample_record import Sample
from services.process.activity import Activity
from services.process.process_memory import ProcessMemory
from services.trajectories.group_report import GroupReport
from services.weights.replica import PullStats
from services.wire.host_port import split_address
from services.wire.messages import NO_VERSION, Lease
from services.wire.reachable import is_loopback, own_address
from services.wire.tls import Credentials


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """Everything a worker needs to start; plain values, so that it can travel."""

    name: str
    run_id: str
    seed: int
    platform: str
    model_path: str
    tokenizer: str | None
    chat_template: str | None
    stop_tokens: tuple[str, ...]
    moment: datetime.datetime
    """The time that the chat template reads, with its time zone: one for the whole run."""
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    environment: EnvironmentConfig | None = None
    """That answers the model; None where a completion is one turn."""
    learner_address: str
    credentials: Credentials
    weights_dtype: str
    """Of the policy versions that the learner publishes."""
    adapter: AdapterShape | None = None
    """That every version is, of the model at model_path; None where versions are whole models."""
    base_dtype: str = "float32"
    """In which the learner holds that model at most."""
    bind_host: str
    """Of the run: where it is loopback, the worker serves there too, else on its own address."""
    streams: int
    chunk_bytes: int
    deltas: bool
    """Whether only what changed is asked for, where that is possible."""
    canary: bool
    """Whether every version is proved by the learner's scores of a probe."""
    canary_bound: float | None
    """Largest gap of a logprob that passes, in nats; None takes that of the dtypes."""
    timeout_s: float
    """Bound of one weight transfer and of one push."""
    samples_per_step: int
    """Completions of a step that the log keeps; where it is 0, none is returned as text."""
    run_folder: str
    """Where the process says how it can be asked for its stacks."""
    driver_lease_s: float | None = None
    """The process ends once the driver has asked nothing for so long; None lets it stay."""
    failpoints: str | None = None
    """Folder of `services/process/failpoints.py`, in tests of faults."""

    @property
    def slowest_call_s(self) -> float:
        """How long scorers of a completion, or a call of an environment, may take."""
        return (self.reward if self.environment is None else self.environment).timeout_s

    @property
    def serving_host(self) -> str:
        """Where the worker serves weights to others: on loopback if the run does, else on its own
        address towards the learner.
        """
        if is_loopback(self.bind_host):
            return self.bind_host
        return own_address(split_address(self.learner_address)[0])


class LeaseOutcome(enum.Enum):
    """How one lease ended at the worker."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The learner had the group already."""
    STALE = "stale"
    """The learner refused the group for its age."""
    RETURNED = "returned"
    """Not begun: the worker is draining."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Where and on what a worker runs that is ready."""

    name: str
    host: str
    pid: int
    devices: str
    """Such as `8 x NVIDIA H100`."""
    address: str
    """That serves weights to other workers; empty where it shares the learner's process."""
    slots: int
    """Completions that it decodes at once."""
    data: DataDigests
    """Of the data that it reads."""
    clock_s: float
    """Its monotonic clock while it answered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """Held-out prompts that a worker is to complete and score."""

    held_out: int = 0
    """Which of the held-out sets."""
    positions: Sequence[int]
    """Places in it."""
    policy_version: int
    """The oldest version that may complete them; with `when_idle` the only one."""
    samples: int
    """Completions of each prompt."""
    sampling: SamplingSettings
    timeout_s: float
    """With `when_idle` there is no bound."""
    when_idle: bool = False
    """Only while the worker has nothing else to do; it must keep that version (`Orders`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalItem:
    """One held-out completion; eval.jsonl has it with `correct`, which is decided later."""

    set: str = ""
    """Name of its held-out set; empty for the only one."""
    prompt_id: int
    sample_index: int
    question: str
    answer: str
    completion: str
    completion_tokens: int
    finish_reason: str
    rewards: dict[str, float]
    total_reward: float
    reward_error: str
    policy_version: int
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """What scorers say of their rewards, by scorer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What the driver wants of a worker; every field may be absent.

    They may arrive in another order than they were sent in: `number` says which is the later one.
    """

    number: int = 0
    """Counts the orders to one process, from 1."""
    leases: tuple[Lease, ...] = ()
    cancel: tuple[str, ...] = ()
    """Group ids whose leases are void, whether they have begun or not."""
    drain: bool = False
    """Finish what is being decoded, return the rest, take nothing more."""
    refetch: bool = False
    """Give the version up that is held, since no learner of this run issues it any more."""
    keep_version: int | None = None
    """The policy version to keep beside the current one, for an evaluation; NO_VERSION for none."""
    sources: tuple[str, ...] | None = None
    """Addresses that serve weights, preferred first; the learner's is the last."""
    learner_address: str | None = None
    """Where groups are pushed."""
    stop_spending: str = ""
    """Why scorers may spend nothing more; empty where they may."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaseResult:
    """How one lease ended."""

    group_id: str
    attempt: int
    order_number: int
    """Of the orders that brought the lease: two leases of a group may have the same attempt."""
    outcome: LeaseOutcome
    report: GroupReport | None
    """None for a lease that was returned."""
    samples: tuple[Sample, ...] = ()
    """Completions for the log, of a group that was accepted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineUse:
    """What a worker's engine did since the worker was last asked, and what it keeps now."""

    tokens: int = 0
    """Drawn."""
    slot_steps: int = 0
    """Token steps x slots: so many could have been drawn."""
    prefilled_tokens: int = 0
    """Of prompts."""
    reused_tokens: int = 0
    """Of prompts that were not prefilled, since they were parked."""
    parked: int | None = None
    """Episodes that are kept between their turns; None where the engine keeps none."""
    parked_bytes: int = 0
    """Device memory of these."""

    def __add__(self, later: "EngineUse") -> "EngineUse":
        return EngineUse(
            tokens=self.tokens + later.tokens,
            slot_steps=self.slot_steps + later.slot_steps,
            prefilled_tokens=self.prefilled_tokens + later.prefilled_tokens,
            reused_tokens=self.reused_tokens + later.reused_tokens,
            parked=later.parked,
            parked_bytes=later.parked_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class News:
    """What happened at a worker since it was last asked."""

    drained: bool
    """Whether it was ordered to drain and holds no lease any more."""
    policy_version: int
    """Held on the device; -1 before the first."""
    kept_version: int = NO_VERSION
    """Kept for an evaluation."""
    weight_digest: str
    canary_gap: float
    """On the probe, under this version: largest gap of a logprob, in nats; NaN without a probe."""
    held: int
    """Leases not ended."""
    results: tuple[LeaseResult, ...]
    background_s: dict[str, float]
    """Seconds that threads beside the one of the ledger spent: `fetch`, `push`."""
    transfers: tuple[PullStats, ...]
    """One record for every version that was fetched."""
    memory: ProcessMemory
    spent: Spending = NOTHING
    """By scorers, training and evaluation together."""
    environment: EnvironmentUse = NO_USE
    """Of environments, training and evaluation together."""
    engine: EngineUse = EngineUse()
    """Of all that it decoded, evaluations included."""
    learner_silent_s: float = 0.0
    """For how long the learner has not answered this worker; 0 where it does."""
    activity: Activity
    """Of its working thread, or of its pushes while that waits for work."""
