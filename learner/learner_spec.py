"""What a learner is given at its start, and what follows from that alone."""

import dataclasses

from learner.config import AlgorithmConfig, LearnerConfig
from services.trajectories.data_order import DataOrder
from services.wire.reachable import is_any, own_address
from services.wire.tls import Credentials


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """Everything the learner needs to start; plain values, so that it can travel."""

    run_id: str
    seed: int
    platform: str
    model_path: str
    tokenizer: str | None
    chat_template: str | None
    stop_tokens: tuple[str, ...]
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    total_steps: int
    temperature: float
    max_prompt_tokens: int
    max_completion_tokens: int
    order: DataOrder | None
    """That ids and epochs of groups follow; None where they follow none."""
    max_staleness: int
    weights_dtype: str
    export_dtype: str | None
    """Of the exported tensors; None gives each the type that it came in."""
    chunk_bytes: int
    keep_versions: int
    group_size: int
    """Completions of every group."""
    buffer_groups: int
    """Groups that may wait; more are refused until some are taken."""
    buffer_bytes: int
    bind_host: str
    port: int
    """0 takes a free one."""
    driver_host: str
    """Address of the driver: the route to it decides which address of this host workers dial."""
    credentials: Credentials
    checkpoint_folder: str
    keep_checkpoints: int
    checkpoint_wait_s: float = 3600.0
    """Bound of a wait for a checkpoint that is being written in the background."""
    earlier_port: int | None = None
    """Of the learner that this one replaces, which workers know: taken where it is free."""
    rollouts_file: str | None = None
    """Where the groups of every update are recorded, if anywhere."""
    canary: bool = True
    """Whether every version comes with scores of a probe, for the workers to compare."""
    reward_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of each reward function, by name."""
    teacher_digest: str | None = None
    """Of the teacher that the driver checked (models/files/fingerprint.py); None without one."""
    driver_lease_s: float | None = None
    """The process ends once the driver has asked nothing for so long; None lets it stay."""
    failpoints: str | None = None
    """Folder of a test's failpoints, if any (services/process/failpoints.py)."""


def reachable_host(spec: LearnerSpec) -> str:
    """What workers dial: the address listened on, or ours on the way to the driver."""
    return own_address(spec.driver_host) if is_any(spec.bind_host) else spec.bind_host
