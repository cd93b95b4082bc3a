"""What a run sends and what its processes keep in host memory, by arithmetic. Bytes, at most."""

import dataclasses

from driver.config.actor_specs import BUFFER_BYTES
from driver.config.plan import Plan
from driver.config.run_config import RunConfig
from services.weights.store import DELTA_SHARE


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Of one learner and one rollout worker; what Python, JAX and the data take is not in it."""

    version_bytes: int
    """Of one policy version on the wire, whole, to one worker."""
    delta_bytes: int
    """Largest delta that is sent in place of it; 0 where there are none."""
    sent_bytes_per_step: int
    """By the learner, and by workers that pass a version on, where all go whole."""
    learner: dict[str, int]
    """What it is -> bytes."""
    worker: dict[str, int]


def host_memory(
    config: RunConfig, plan: Plan, *, state_bytes: int, offloaded_bytes: int
) -> HostMemory:
    """Host memory of the two roles.

    Args:
        state_bytes: of parameters and optimiser state, of all devices together.
        offloaded_bytes: of optimiser state that lies in the memory of the host between updates.
    """
    version = plan.wire_bytes_per_version
    shared = plan.devices.shared
    kept = config.weights.keep_versions
    deltas = config.weights.deltas and not shared
    delta = int(DELTA_SHARE * version) if deltas else 0
    learner = {
        "policy versions, with the one that is published": (kept + 1) * version,
        "deltas": kept * delta if not shared else 0,
        "groups that wait": BUFFER_BYTES,
        "optimiser state": offloaded_bytes,
        "state, while a checkpoint is written": state_bytes,
    }
    worker = {} if shared else {"policy version and the next": 2 * version, "delta": delta}
    return HostMemory(
        version_bytes=version,
        delta_bytes=delta,
        sent_bytes_per_step=0 if shared else version * config.rollout.workers.at_start,
        learner={name: count for name, count in learner.items() if count},
        worker={name: count for name, count in worker.items() if count},
    )
