"""The shell of a rollout worker: its loop, its threads, its connections.

A plain class, so that it runs in a Ray actor (driver/supervisor.py) or in any other process. It
moves data and decides nothing.
"""

import functools
import logging
import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from models.device_memory import device_memory
from models.files.checkpoint import read_model_config
from models.platform import require_platform
from models.tokenizer import load_tokenizer
from rollout_worker.canary import CanaryCheck
from rollout_worker.data.prompts import PromptSet, load_prompts
from rollout_worker.engine_setup import EngineSetup
from rollout_worker.fetcher import Fetched, Fetcher
from rollout_worker.loop import WorkLoop
from rollout_worker.pusher import Pusher
from rollout_worker.rewards.reward_pool import RewardPool
from rollout_worker.sample_record import Sample, SampleRecords
from rollout_worker.worker import CanaryFailed, RolloutWorker
from rollout_worker.worker_records import EvalItem, EvalRequest, News, Orders, WorkerInfo
from rollout_worker.worker_spec import RolloutSpec
from services.process import failpoints, stacks
from services.process.phase_clock import PhaseClock
from services.process.process_memory import process_memory
from services.process.span_log import StepTiming
from services.trajectories.client import TrajectoryClient
from services.weights.replica import PullStats, Replica
from services.wire.health import check_serving
from services.wire.messages import Group, Lease, WeightManifest
from services.wire.reachable import host_of, is_loopback, own_address

log = logging.getLogger(__name__)

DIAL_S = 30.0
"""How long the learner may take to answer a worker that starts."""

HandOver = Callable[[int, float], tuple[WeightManifest, Mapping[str, jax.Array]]]
"""Version wanted at least and seconds to wait for it -> its manifest and arrays of this process;
raises TimeoutError."""


class RolloutActor:
    """Owns one worker, its loop and its connections; its methods may be called side by side."""

    def __init__(self, spec: RolloutSpec, hand_over: HandOver | None = None):
        """Args:
        hand_over: where policy versions come from when the learner is in this process; None
            has them fetched over the network, and served to others.
        """
        failpoints.install(spec.failpoints)
        if hand_over is None:  # else the learner has registered the process that they share
            stacks.register(pathlib.Path(spec.run_folder), spec.name)
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
        canary = (
            CanaryCheck(engine.spec, self._clock, bound=spec.canary_bound) if spec.canary else None
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
            canary=canary,
        )
        self._records = SampleRecords(
            functools.partial(tokenizer.decode, skip_special=False),
            self._worker.completion_text,
            per_step=spec.samples_per_step,
            reads_numbers=any(one.name == "gsm8k_answer" for one in spec.reward.functions),
        )
        loopback = is_loopback(spec.bind_host)
        self._hand_over = hand_over
        self._replica = None
        if hand_over is None:
            self._replica = Replica(
                spec.credentials,
                run_id=spec.run_id,
                host=spec.bind_host if loopback else own_address(host_of(spec.learner_address)),
                deltas=spec.deltas,
                streams=spec.streams,
                chunk_bytes=spec.chunk_bytes,
            )
        self._devices = devices
        self._clock.take_timing()  # time before this belongs to no step
        self._loop = WorkLoop(
            self._worker,
            self._clock,
            make_fetcher=lambda wake: Fetcher(self._pull, (spec.learner_address,), wake),
            make_pusher=lambda ended, wake: Pusher(
                lambda address: TrajectoryClient(address, spec.credentials),
                spec.learner_address,
                timeout_s=spec.timeout_s,
                samples=self._samples,
                on_result=ended,
                on_failure=wake,
            ),
            swap=self._swap,
            memory=lambda: process_memory(device_memory(devices)),
            weights_timeout_s=spec.timeout_s,
        )

    def describe(self) -> WorkerInfo:
        """Says that the worker is ready, and where and on what it runs."""
        return WorkerInfo(
            name=self._spec.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=f"{len(self._devices)} x {self._devices[0].device_kind}",
            address="" if self._replica is None else self._replica.address,
            slots=self._spec.rollout.decode.slots,
            prompts_digest=self._prompts[0].digest,
            clock_s=time.monotonic(),
        )

    def order(self, orders: Orders) -> None:
        """Takes leases and other wishes of the driver; returns at once."""
        self._loop.order(orders)

    def news(self, wait_s: float) -> News:
        """What happened since the last call; waits for something to happen, at most so long."""
        return self._loop.news(wait_s)

    def evaluate(self, request: EvalRequest) -> list[EvalItem]:
        """Completes and scores held-out prompts, between groups, under the version asked for.

        Raises:
            TimeoutError: if it did not end in time.
        """

        def run() -> list[EvalItem]:
            with self._clock.phase("eval"):
                return self._worker.evaluate(
                    request.positions, samples=request.samples, sampling=request.sampling
                )

        return self._loop.call(request.policy_version, run, request.timeout_s)

    def take_timing(self, until_s: float | None = None) -> StepTiming:
        """What the worker did since the previous timing; as `PhaseClock.take_timing`."""
        return self._clock.take_timing(until_s)

    def close(self) -> None:
        """Ends the threads, the reward processes and the connections."""
        self._loop.stop()
        if self._replica is not None:
            self._replica.close()
        self._loop.close()
        self._rewards.close()

    def _pull(self, min_version: int, sources: Sequence[str], wait_s: float) -> Fetched:
        if self._hand_over is not None:
            manifest, tensors = self._hand_over(min_version, wait_s)
            return Fetched(manifest, tensors, _nothing_travelled(manifest))
        assert self._replica is not None
        pulled = self._replica.pull(
            min_version, sources, wait_s, transfer_timeout_s=self._spec.timeout_s
        )
        return Fetched(pulled.manifest, pulled.tensors, pulled.stats)

    def _swap(self, fetched: Fetched) -> None:
        """Swaps a version in; one whose canary fails is placed on the device once more."""
        try:
            self._worker.swap_policy(fetched.manifest, fetched.named)
        except CanaryFailed as error:
            log.warning("%s; placing it once more", error)
            self._worker.swap_policy(fetched.manifest, fetched.named)

    def _samples(self, group: Group, lease: Lease) -> tuple[Sample, ...]:
        prompt = self._prompts[0].prompts[lease.position]
        return self._records.of_group(group, prompt, marked=lease.logged)


def _nothing_travelled(manifest: WeightManifest) -> PullStats:
    """How a version came that was handed over on the devices."""
    return PullStats(
        policy_version=manifest.policy_version,
        version_bytes=manifest.nbytes,
        wire_bytes=0,
        delta=False,
        wait_s=0.0,
        seconds=0.0,
        sources=(),
        depth=0,
        failures=(),
    )
