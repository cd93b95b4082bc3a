"""Everything that must go on while the driver waits for something.

Owns the learner's actor and the fleet of rollout workers. Every wait is a series of `turn`s: each
looks for a signal, lets the step loop give out work, and books what workers report. Every wait
ends: by its result, by a signal, or by a deadline whose error names who was waited for.
"""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from driver.accounting.step_timing import LEARNER, RunTiming
from driver.config.run_config import RunConfig
from driver.errors import RunError
from driver.fleet import actors
from driver.fleet.actors import GONE, POLL_S, ActorFailed, LearnerLost, NoAnswer, Room
from driver.fleet.fleet import Fleet, FleetEvents
from driver.fleet.fleet_snapshot import learner_status
from driver.fleet.launch import Launcher
from driver.fleet.timing_collector import TimingCollector
from driver.signals import StopSignal
from learner.learner_records import LearnerHealth
from learner.learner_spec import LearnerSpec
from rollout_worker.actor import RolloutSpec
from services.control.messages import LearnerStatus
from services.process.process_memory import ProcessMemory

WATCH_S = 1.0
"""Between two questions for the learner's health: how late its death may be noticed."""

SILENT_S = 60.0
"""How long it may take to answer: a process that is stopped counts as lost then."""
ASK_S = 2.0
"""For a learner that may not answer any more."""


class RestartsUsedUp(RunError):
    """The learner died more often than the run allows; only a resume goes on."""


def shares(work: Sequence[Any], workers: int) -> list[list[Any]]:
    """Cuts work into one share for each worker, in order; the last may be smaller or none."""
    size = max(1, math.ceil(len(work) / workers))
    return [list(work[start : start + size]) for start in range(0, len(work), size)]


class Supervisor:
    """Owns the actors of one run."""

    def __init__(
        self,
        config: RunConfig,
        group: PlacementGroup,
        stop: StopSignal,
        warn: Callable[[str], None],
    ):
        self._config = config
        self._group = group
        self._stop = stop
        self._warn = warn
        self._launcher = Launcher(config.placement)
        self._learner: Any = None
        self._watch: Any = None
        self._watch_at = 0.0
        self._watch_asked = 0.0
        self._timings = TimingCollector()
        self.about: dict[str, Any] = {}
        """What the learner says of itself."""
        self.health: LearnerHealth | None = None
        """Of the learner, as last heard; None until it was asked."""
        self._fleet: Fleet | None = None
        self.before_turn: Callable[[], None] = lambda: None
        """The step loop's: gives out leases."""
        self.learner_restarts = 0

    @property
    def fleet(self) -> Fleet:
        """The rollout workers; there once `start_workers` was called."""
        assert self._fleet is not None
        return self._fleet

    def start_learner(self, spec: LearnerSpec) -> dict[str, Any]:
        """Starts the learner and waits until it serves; returns what it says of itself."""
        try:
            return self._begin_learner(spec)
        except LearnerLost as error:
            raise actors.start_failure(error.__cause__ or error, "learner") from error
        except ActorFailed as error:
            raise actors.start_failure(error, "learner") from error

    def restart_learner(self, spec: LearnerSpec, error: LearnerLost) -> dict[str, Any]:
        """Starts another learner in place of one that died.

        Raises:
            LearnerLost: if that one dies too before it serves.
            RestartsUsedUp: if the run allows no more.
        """
        self.learner_restarts += 1
        allowed = self._config.placement.learner_restarts
        if self.learner_restarts > allowed:
            raise RestartsUsedUp(
                f"{error}; placement.learner_restarts={allowed} is used up, --resume goes on from "
                "the last checkpoint",
                details=error.details,
            ) from error
        self._warn(f"{error}: restart {self.learner_restarts} of {allowed}")
        with contextlib.suppress(ValueError):
            actors.kill(self._learner)
        if not self._launcher.colocated or self._fleet is None:
            return self._begin_learner(spec)
        self._fleet.await_process(error)
        about = self._begin_learner(spec)
        self._fleet.enter_process()
        return about

    def _begin_learner(self, spec: LearnerSpec) -> dict[str, Any]:
        room = Room(self._group, 0, shared=True)
        self._learner = self._launcher.learner(spec, room)
        self._timings.table.remove_process(LEARNER)
        self.health = None
        self._watch, self._watch_at = None, math.inf  # it is asked nothing else before it serves
        asked_s = time.monotonic()
        self.about = self.learner("describe", timeout_s=self._config.placement.startup_timeout_s)
        self._timings.table.add_process(LEARNER, asked_s, self.about)
        self._watch_at = 0.0
        return self.about

    def make_fleet(self, make_spec: Callable[[str], RolloutSpec], events: FleetEvents) -> Fleet:
        """A fleet without workers."""
        self._fleet = Fleet(self._config, self._launcher, make_spec, events, self._timings)
        return self._fleet

    def start_workers(self, count: int) -> None:
        """Starts the rollout workers that the run begins with, and waits until each is ready.

        Those that an interrupted try has started are kept.
        """
        for index in range(len(self.fleet.workers), count):
            self.fleet.add(Room(self._group, index + 1, shared=True))
        deadline = time.monotonic() + self._config.placement.startup_timeout_s
        while len(self.fleet.ready()) < count:
            self.turn()
            if time.monotonic() > deadline:
                ready = {worker.name for worker in self.fleet.ready()}
                missing = sorted(self.fleet.workers.keys() - ready)
                raise NoAnswer(
                    f"{', '.join(missing)} did not start within placement.startup_timeout_s="
                    f"{self._config.placement.startup_timeout_s:g} s"
                )

    def check_stop(self) -> None:
        """Raises Interrupted after a signal, as every wait does that may be interrupted."""
        self._stop.check()

    def turn(self, calls: Collection[Any] = (), *, interruptible: bool = True) -> set[Any]:
        """Looks once at everything under way; returns those of `calls` that have ended.

        Raises:
            Interrupted: after a signal, where the caller lets itself be interrupted.
            LearnerLost: if the learner's process is gone.
            ActorFailed: if the learner reports a failure of one of its threads.
            WorkersLost: if a worker was lost once too often.
        """
        if interruptible:
            self._stop.check()
        self.before_turn()
        if self._watch is None and self._learner is not None and time.monotonic() > self._watch_at:
            self._watch = self._learner.health.remote()
            self._watch_asked = time.monotonic()
        waited = [*calls] if self._watch is None else [*calls, self._watch]
        if self._fleet is None:
            ended = set(ray.wait(waited, timeout=POLL_S)[0]) if waited else set()
        else:
            ended = self._fleet.pump(POLL_S, waited)
        silent_s = min(SILENT_S, self._config.placement.step_timeout_s)
        if self._watch not in (None, *ended) and time.monotonic() - self._watch_asked > silent_s:
            raise LearnerLost(f"the learner did not answer 'health' within {silent_s:g} s")
        if self._watch in ended:
            watch, self._watch, self._watch_at = self._watch, None, time.monotonic() + WATCH_S
            self.health = health = self._learner_result(watch, "health")
            if health.problem:
                raise ActorFailed(f"the learner: {health.problem}")
        return ended & set(calls)

    def learner(self, method: str, *arguments, timeout_s: float, interruptible: bool = True) -> Any:
        """Calls the learner and waits, while the workers go on.

        Args:
            interruptible: whether a signal ends the wait; an update is waited for, so that the
                books know what it trained on.

        Raises:
            LearnerLost: if its process is gone.
            ActorFailed: if it raised an error of its own.
            NoAnswer: naming the method.
        """
        call = getattr(self._learner, method).remote(*arguments)
        deadline = time.monotonic() + timeout_s
        while call not in self.turn([call], interruptible=interruptible):
            if time.monotonic() > deadline:
                raise NoAnswer(f"the learner did not answer {method!r} within {timeout_s:g} s")
        return self._learner_result(call, method)

    def evaluate(self, positions: Sequence[int], policy_version: int) -> list[dict[str, Any]]:
        """Completes and scores held-out prompts on all workers."""
        settings = self._config.eval
        timeout_s = self._config.placement.step_timeout_s
        waiting = deque(shares(positions, max(1, len(self.fleet.ready()))))
        running: dict[Any, tuple[Any, list[int], float]] = {}
        results: list[dict[str, Any]] = []
        while waiting or running:
            busy = {worker.name for worker, _, _ in running.values()}
            for worker in self.fleet.ready():
                if waiting and worker.name not in busy:
                    piece = waiting.popleft()
                    call = worker.actor.evaluate.remote(
                        piece,
                        policy_version,
                        settings.samples_per_prompt,
                        settings.sampling,
                        timeout_s,
                    )
                    running[call] = (worker, piece, time.monotonic() + timeout_s)
            ended = self.turn(running)
            late = {call for call, (_, _, end) in running.items() if time.monotonic() > end}
            for call in ended | late:
                worker, piece, _ = running.pop(call)
                try:
                    if call not in ended:
                        raise NoAnswer(f"{worker.name} did not finish evaluate in {timeout_s:g} s")
                    results += actors.result_of(call, worker.name, "evaluate")
                except (*GONE, ActorFailed, NoAnswer) as error:
                    waiting.append(piece)
                    self.fleet.lost_while(worker, error)
        return results

    def step_timings(self) -> RunTiming:
        """What every process did since the last call, up to the moment of this one."""
        there = {worker.name: worker.actor for worker in self.fleet.running()}
        try:
            return self._timings.collect(
                {LEARNER: self._learner, **there},
                [LEARNER, *self.fleet.workers],
                timeout_s=self._config.placement.step_timeout_s,
                check=self._stop.check,
            )
        except GONE as error:
            raise self._lost(error, "take_timing") from error

    def learner_status(self) -> LearnerStatus | None:
        """The learner as it was last heard; None before the first served."""
        return learner_status(self.about, self.health, self.learner_restarts)

    def memory(self) -> dict[str, ProcessMemory]:
        """What the processes hold that have told, as last heard; by name."""
        held = {worker.name: worker.memory for worker in self.fleet.workers.values()}
        held[LEARNER] = None if self.health is None else self.health.memory
        return {name: memory for name, memory in held.items() if memory is not None}

    def tables(self) -> dict[str, Any]:
        """What is known of actors and queues, as plain values; nobody is asked for long."""
        tables: dict[str, Any] = {"fleet": [] if self._fleet is None else self._fleet.table()}
        if self._learner is not None:
            call = self._learner.health.remote()
            if ray.wait([call], timeout=ASK_S)[0]:
                with contextlib.suppress(*GONE, ActorFailed):
                    health = actors.result_of(call, "the learner", "health")
                    tables["buffer"] = dataclasses.asdict(health)
        return tables

    def shutdown(self, grace_s: float = 10.0) -> None:
        """Ends every actor; what does not end by itself in time is killed."""
        closing = None if self._learner is None else self._learner.close.remote()
        if self._fleet is not None:
            self._fleet.shutdown(grace_s)
        if self._learner is not None:
            ray.wait([closing], timeout=grace_s)
            actors.kill(self._learner)
        self._learner = None

    def _learner_result(self, call: Any, method: str) -> Any:
        try:
            return actors.result_of(call, "the learner", method)
        except GONE as error:
            raise self._lost(error, method) from error

    def _lost(self, error: BaseException, method: str) -> LearnerLost:
        return LearnerLost(
            f"the learner died during {method!r}: {actors.message_of(error)}", details=str(error)
        )


def with_port(spec: LearnerSpec, address: str) -> LearnerSpec:
    """The spec of a learner that takes another's place, and its port where that is free there."""
    return dataclasses.replace(spec, port=int(address.rpartition(":")[2]))
