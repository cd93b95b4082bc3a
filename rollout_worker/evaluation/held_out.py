"""Held-out sets, as a worker has them."""

import dataclasses
from collections.abc import Sequence

from rollout_worker.data.prompts import Prompt
from rollout_worker.environments.environment_pool import EnvironmentPool
from rollout_worker.rewards.reward_pool import RewardPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One held-out set, and what scores it."""

    name: str
    """Empty for the only set of a run."""
    prompts: Sequence[Prompt]
    rewards: RewardPool | EnvironmentPool
