"""The shell of a rollout worker: its loop, its threads, its connections.

A plain class, so that it runs in a Ray actor (driver/fleet/launch.py) or in any other process. It
moves data and decides nothing: `WorkerCore` and `WorkLoop` do.
"""

import functools
import os
import pathlib
import socket
import time

from models.device_memory import device_memory
from models.platform import require_platform
from rollout_worker.fetcher import Fetcher, WaitForShared, pull_into, pull_shared
from rollout_worker.loop import WorkLoop
from rollout_worker.pusher import Pusher
from rollout_worker.worker_core import WorkerCore
from rollout_worker.worker_records import (
    EvalItem,
    EvalRequest,
    News,
    Orders,
    RolloutSpec,
    WorkerInfo,
)
from services.process import failpoints, stacks
from services.process.driver_lease import DriverLease
from services.process.phase_clock import PhaseClock
from services.process.process_memory import process_memory
from services.process.span_log import StepTiming
from services.trajectories.client import TrajectoryClient
from services.weights.replica import Replica
from services.wire.health import LearnerProbe, check_reachable, check_serving

DIAL_S = 30.0
"""How long the learner may take to answer a worker that starts."""


class RolloutActor:
    """Owns one worker, its loop and its connections; its methods may be called side by side."""

    def __init__(self, spec: RolloutSpec, wait_for_shared: WaitForShared | None = None):
        """Args:
        wait_for_shared: waits for a policy version of the learner in this process; None has
            them fetched over the network, and served to others.
        """
        failpoints.install(spec.failpoints)
        if wait_for_shared is None:  # else the learner has registered the process that they share
            stacks.register(pathlib.Path(spec.run_folder), spec.name)
        self._devices = devices = require_platform(spec.platform)
        check_serving(spec.learner_address, spec.credentials, timeout_s=DIAL_S)
        self._spec = spec
        self._clock = PhaseClock()
        self._core = WorkerCore(spec, devices, self._clock)
        self._replica = None
        if wait_for_shared is not None:
            pull = pull_shared(wait_for_shared)
        else:
            self._replica = Replica(
                spec.credentials,
                run_id=spec.run_id,
                host=spec.serving_host,
                deltas=spec.deltas,
                streams=spec.streams,
                chunk_bytes=spec.chunk_bytes,
            )
            pull = pull_into(self._replica, spec.timeout_s)
        self._lease = None
        if spec.driver_lease_s is not None and wait_for_shared is None:
            self._lease = DriverLease(spec.name, spec.driver_lease_s)
            self._lease.start()
        self._clock.take_timing()  # time before this belongs to no step
        self._loop = WorkLoop(
            self._core.worker,
            self._clock,
            make_fetcher=lambda wake: Fetcher(pull, (spec.learner_address,), wake),
            make_pusher=lambda ended, wake: Pusher(
                lambda address: TrajectoryClient(address, spec.credentials),
                spec.learner_address,
                timeout_s=spec.timeout_s,
                samples=self._core.samples,
                on_result=ended,
                on_failure=wake,
            ),
            memory=lambda: process_memory(device_memory(devices)),
            weights_timeout_s=spec.timeout_s,
            probe=None if wait_for_shared is not None else self._probe(spec),
            slack_s=2 * spec.slowest_call_s,  # what a child had that died is done again
        )

    def _probe(self, spec: RolloutSpec) -> LearnerProbe:
        def ask(address: str, timeout_s: float) -> None:
            check_reachable(address, spec.credentials, timeout_s=timeout_s)

        return LearnerProbe(ask, spec.learner_address)

    def describe(self) -> WorkerInfo:
        """Says that the worker is ready, and where and on what it runs."""
        return WorkerInfo(
            name=self._spec.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=f"{len(self._devices)} x {self._devices[0].device_kind}",
            address="" if self._replica is None else self._replica.address,
            slots=self._spec.rollout.decode.slots,
            data=self._core.data_digests,
            clock_s=time.monotonic(),
        )

    def order(self, orders: Orders) -> None:
        """Takes leases and other wishes of the driver; returns at once."""
        self._loop.order(orders)

    def news(self, wait_s: float) -> News:
        """What happened since the last call; waits for something to happen, at most so long. The
        driver asks all the time: where it does not, the process ends.
        """
        if self._lease is not None:
            self._lease.renew()
        return self._loop.news(wait_s)

    def evaluate(self, request: EvalRequest) -> list[EvalItem]:
        """Completes and scores held-out prompts: between groups, under a version of at least the
        one asked for, or while nothing else is to do, under exactly that one.

        Raises:
            TimeoutError: between groups, if it did not end in time.
        """
        if request.when_idle:
            return self._loop.evaluate_when_idle(request)
        run = functools.partial(self._core.evaluate, request)
        return self._loop.call(request.policy_version, run, request.timeout_s)

    def take_timing(self, until_s: float | None = None) -> StepTiming:
        """What the worker did since the previous timing; as `PhaseClock.take_timing`."""
        return self._clock.take_timing(until_s)

    def evidence(self) -> dict[str, str]:
        """Stacks and last log lines of this process, by file name."""
        return stacks.own_evidence()

    def close(self) -> None:
        """Ends the threads, the reward processes and the connections."""
        self._loop.stop()
        if self._replica is not None:
            self._replica.close()
        self._loop.close()
        self._core.close()
