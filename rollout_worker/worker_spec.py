"""What a rollout worker is given at its start."""

import dataclasses

from rollout_worker.config import DataConfig, RewardConfig, RolloutConfig
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
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    learner_address: str
    credentials: Credentials
    weights_dtype: str
    """Of the policy versions that the learner publishes."""
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
    failpoints: str | None = None
    """Folder of `services/process/failpoints.py`, in tests of faults."""
