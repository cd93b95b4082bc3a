"""The shell of a rollout worker: fetches weights, runs the core, pushes groups.

A plain class, so that it runs in a Ray actor (driver/supervisor.py) or in any other process. It
moves data and decides nothing.
"""

import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from models.checkpoint import read_model_config
from models.platform import require_platform
from models.tokenizer import load_tokenizer
from rollout_worker.config import DataConfig, RewardConfig, RolloutConfig
from rollout_worker.prompts import PromptSet, load_prompts
from rollout_worker.requests import SamplingSettings
from rollout_worker.reward_pool import RewardPool
from rollout_worker.setup import EngineSetup
from rollout_worker.worker import RolloutWorker
from services.group_buffer import StaleGroup
from services.health import check_serving
from services.messages import Group, Lease
from services.phase_clock import PhaseClock
from services.tls import Credentials
from services.trajectory_client import TrajectoryClient, pack_group
from services.weight_client import WeightClient

log = logging.getLogger(__name__)

DIAL_S = 30.0
"""How long the learner may take to answer a worker that starts."""


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
    streams: int
    timeout_s: float
    """Bound of one weight transfer and of one push."""
    samples_per_call: int
    """Completions of each `rollout` that are returned as text, for the log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupReport:
    """How one lease ended, without its arrays."""

    group_id: str
    outcome: str
    """`accepted`, `duplicate` or `stale`."""
    zero_variance: bool
    """At least one completion was scored, and all that were have the same reward."""
    scored: int
    """Completions without a reward_error."""
    reward_sum: float
    """Of their total rewards."""
    reward_error: str
    """Of the first completion that could not be scored; empty where all were."""
    completion_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutReport:
    """What the leases of one call came to."""

    worker: str
    policy_version: int
    groups: list[GroupReport]
    """In the order of the leases."""
    samples: list[dict[str, Any]]


class RolloutActor:
    """Owns one worker and its two connections."""

    def __init__(self, spec: RolloutSpec):
        devices = require_platform(spec.platform)
        check_serving(spec.learner_address, spec.credentials, timeout_s=DIAL_S)
        self._spec = spec
        self._clock = PhaseClock()
        model = read_model_config(spec.model_path)
        tokenizer = load_tokenizer(
            spec.model_path,
            tokenizer=spec.tokenizer,
            chat_template=spec.chat_template,
            stop_tokens=spec.stop_tokens,
        )
        rollout = spec.rollout
        setup = EngineSetup(
            rollout=rollout, model=model, platform=spec.platform, weights_dtype=spec.weights_dtype
        )
        engine = setup.engine(devices, tokenizer, clock=self._clock, warn=log.warning)
        self._prompts = [
            load_prompts(
                source,
                tokenizer=tokenizer,
                system_prompt=spec.data.system_prompt,
                question_template=spec.data.question_template,
                max_prompt_tokens=rollout.max_prompt_tokens,
            )
            if source is not None
            else PromptSet(prompts=(), overlong=0)
            for source in (spec.data.train, spec.data.eval)
        ]
        self._rewards = RewardPool(
            spec.reward.functions,
            processes=spec.reward.processes,
            timeout_s=spec.reward.timeout_s,
        )
        self._worker = RolloutWorker(
            name=spec.name,
            run_id=spec.run_id,
            seed=spec.seed,
            rollout=rollout,
            engine=engine,
            tokenizer=tokenizer,
            rewards=self._rewards,
            train=self._prompts[0],
            held_out=self._prompts[1],
            clock=self._clock,
        )
        self._weights = WeightClient(
            spec.learner_address, spec.credentials, run_id=spec.run_id, streams=spec.streams
        )
        self._trajectories = TrajectoryClient(spec.learner_address, spec.credentials)
        self._devices = devices
        self._idle = contextlib.ExitStack()
        self._idle.enter_context(self._clock.phase("idle"))

    def describe(self) -> dict[str, Any]:
        """Says that the worker is ready, and where and on what it runs."""
        return {
            "name": self._spec.name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "devices": f"{len(self._devices)} x {self._devices[0].device_kind}",
            "prompts_digest": self._prompts[0].digest,
        }

    def rollout(self, leases: Sequence[Lease], policy_version: int) -> RolloutReport:
        """Turns leases into groups in the learner's buffer, under a version of at least this.

        Every group is pushed when it is complete, while the others are still being decoded.
        """
        leased = {lease.group_id: lease for lease in leases}
        shown = list(leased)[: self._spec.samples_per_call]
        reports, samples = {}, {}
        with self._working():
            self._hold_version(policy_version)
            for group in self._worker.rollout(leases):
                reports[group.group_id] = self._push(group)
                if group.group_id in shown:
                    samples[group.group_id] = self._sample(group, leased[group.group_id])
        return RolloutReport(
            worker=self._spec.name,
            policy_version=self._worker.policy_version,
            groups=[reports[group_id] for group_id in leased],
            samples=[samples[group_id] for group_id in shown],
        )

    def evaluate(
        self,
        positions: Sequence[int],
        policy_version: int,
        samples: int,
        sampling: SamplingSettings,
    ) -> list[dict[str, Any]]:
        """Completes and scores held-out prompts; returns records of plain values."""
        with self._working():
            self._hold_version(policy_version)
            with self._clock.phase("eval"):
                items = self._worker.evaluate(positions, samples=samples, sampling=sampling)
        return [dataclasses.asdict(item) for item in items]

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call; they add up to the time between."""
        return self._clock.lap()

    def close(self) -> None:
        """Ends the reward processes and both connections."""
        self._rewards.close()
        self._weights.close()
        self._trajectories.close()

    @contextlib.contextmanager
    def _working(self):
        """Not idle inside; idle again after, also when the work failed."""
        self._idle.close()
        try:
            yield
        finally:
            self._idle.enter_context(self._clock.phase("idle"))

    def _hold_version(self, policy_version: int) -> None:
        """Fetches and swaps in a newer policy where the held one is too old."""
        if self._worker.policy_version >= policy_version:
            return
        with self._clock.phase("weights_wait"):
            manifest = self._weights.manifest(policy_version, timeout_s=self._spec.timeout_s)
        with self._clock.phase("wire"):
            named = self._weights.fetch(manifest, timeout_s=self._spec.timeout_s)
        with self._clock.phase("weights_swap"):
            self._worker.swap(manifest, named)

    def _push(self, group: Group) -> GroupReport:
        with self._clock.phase("serialise"):
            packed = pack_group(group)
        try:
            with self._clock.phase("wire"):
                outcome = self._trajectories.push_packed(packed, self._spec.timeout_s).value
        except StaleGroup:
            outcome = "stale"
        totals = [c.total_reward for c in group.completions if not c.reward_error]
        return GroupReport(
            group_id=group.group_id,
            outcome=outcome,
            zero_variance=len(set(totals)) == 1,
            scored=len(totals),
            reward_sum=sum(totals),
            reward_error=next((c.reward_error for c in group.completions if c.reward_error), ""),
            completion_tokens=sum(len(c.token_ids) for c in group.completions),
        )

    def _sample(self, group: Group, lease: Lease) -> dict[str, Any]:
        """The first completion of a group, as it stands in samples.jsonl."""
        first = group.completions[0]
        prompt = self._prompts[0].prompts[lease.position]
        return {
            "group_id": group.group_id,
            "policy_version": group.policy_version,
            "worker": group.worker,
            "prompt_id": group.prompt_id,
            "question": prompt.question,
            "answer": prompt.answer,
            "completion": self._worker.text(first.token_ids, first.finish_reason),
            "finish_reason": first.finish_reason.value,
            "completion_tokens": len(first.token_ids),
            "rewards": first.rewards,
            "total_reward": first.total_reward,
            "reward_error": first.reward_error,
        }
