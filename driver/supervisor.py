"""Everything that must go on while the driver waits for something.

Owns the learner's actor and the fleet of rollout workers. Every wait is a series of `turn`s: each
checks for a signal, lets the step loop dispatch leases, and records what workers report. Every wait
ends: by its result, by a signal, or by a deadline whose error names the process waited for.
"""

import contextlib
import dataclasses
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from ray.util.placement_group import PlacementGroup

from driver.accounting.awake_clock import AwakeClock
from driver.accounting.restarts import RestartLimit
from driver.accounting.step_timing import RunTiming
from driver.config.actor_specs import ActorSpecs
from driver.config.sections.placement import PlacementConfig
from driver.config.sections.weights import WeightsConfig
from driver.errors import RunError
from driver.fleet.actor_calls import (
    ActorFailed,
    ActorLost,
    Call,
    LearnerLost,
    NoAnswer,
    start_failure,
    wait_for_calls,
)
from driver.fleet.cluster import ResourcesNotMet
from driver.fleet.fleet import WorkerFleet
from driver.fleet.fleet_worker import FleetEvents, memory_fields
from driver.fleet.handles import LearnerHandle
from driver.fleet.launch import Launcher
from driver.fleet.replacement import ended_in_pause
from driver.fleet.rooms import LOOK_S, NOTICED_S, QUIET_S, Room, Rooms, RoomState
from driver.fleet.timing_collector import TimingCollector
from driver.signals import StopSignal
from learner.durable.saved import CLOSE_S, Saved
from learner.learner_records import LearnerHealth, LearnerInfo
from learner.learner_spec import LearnerSpec
from rollout_worker.config.rollout_config import RolloutConfig
from services.control.messages import LearnerStatus
from services.process.activity import HangWatch
from services.process.phases import LEARNER
from services.process.process_memory import ProcessMemory
from services.wire.host_port import split_address

T = TypeVar("T")

POLL_S = 0.5
"""Between two checks for a signal."""
WATCH_S = 1.0
"""Between two questions for the learner's health: how late its death may be noticed."""
SILENT_S = 60.0
"""How long it may take to answer: a process that is stopped counts as lost then."""
HEARD_S = 5.0
"""A learner that takes longer to answer is away, as a worker sees it that asks it too."""
ASK_S = 2.0
"""For a learner that may not answer any more."""
STARTING = "starting"
"""What a learner does that has not reported yet."""


class RestartsUsedUp(RunError):
    """The learner died more often than the run allows; only a resume goes on."""


@contextlib.contextmanager
def keep_asking(learner: LearnerHandle, every_s: float = 20.0) -> Iterator[None]:
    """Asks the learner how it is from another thread, while the caller is at long work of its own:
    a learner that nobody asks anything ends itself.
    """
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(every_s):
            learner.health()

    thread = threading.Thread(target=ask, name="keep-asking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Supervisor:
    """Owns the actors of one run."""

    def __init__(
        self,
        placement: PlacementConfig,
        rollout: RolloutConfig,
        weights: WeightsConfig,
        *,
        specs: ActorSpecs,
        group: PlacementGroup,
        launcher: Launcher,
        rooms: Rooms,
        stop: StopSignal,
        warn: Callable[[str], None],
    ):
        """Starts nothing.

        Args:
            group: room for the learner and the initial workers.
            launcher: starts their processes.
            rooms: knows where rooms lie.
            warn: shows one line.
        """
        self._placement = placement
        self._rollout = rollout
        self._weights = weights
        self._specs = specs
        self._group = group
        self._stop = stop
        self._warn = warn
        self._launcher = launcher
        self._rooms = rooms
        self.clock = AwakeClock()
        """Of deadlines."""
        self._limit = RestartLimit(placement.learner_restarts)
        self._learner: LearnerHandle | None = None
        self._place = RoomState()
        """Where the learner was started."""
        self._watch: Call[LearnerHealth] | None = None
        self._watch_at = self._watch_asked = 0.0
        self._answers_since = math.inf
        """Since when the learner has answered each question in HEARD_S."""
        self._look_at = 0.0
        """When to look for the learner's host next, while the learner is silent."""
        self._timings = TimingCollector(self.clock)
        self._info: LearnerInfo | None = None
        """None before the first learner serves."""
        self._health: LearnerHealth | None = None
        """As last reported; None until it was asked."""
        self._hangs = HangWatch()
        self._fleet: WorkerFleet | None = None
        self.before_turn: Callable[[], None] = lambda: None
        """The step loop's: dispatches leases."""
        self.background: Callable[[], Collection[Call[object]]] = lambda: ()
        """Calls that end a wait too: those of an evaluation beside training."""
        self.learner_restarts = 0

    @property
    def fleet(self) -> WorkerFleet:
        """The rollout workers; there once `make_fleet` was called."""
        assert self._fleet is not None
        return self._fleet

    @property
    def learner(self) -> LearnerHandle:
        """The learner; there once `start_learner` was called."""
        assert self._learner is not None
        return self._learner

    @property
    def learner_info(self) -> LearnerInfo:
        """Where the learner runs; there once `start_learner` has returned."""
        assert self._info is not None
        return self._info

    def start_learner(self) -> None:
        """Starts the learner and waits until it serves."""
        try:
            self._begin_learner(self._specs.learner(), self._rooms.state(self._room))
        except LearnerLost as error:
            cause = error.__cause__
            lost = cause if isinstance(cause, ActorLost) else error
            raise start_failure(lost, "learner") from error
        except ActorFailed as error:
            raise start_failure(error, "learner") from error

    def restart_learner(self, error: LearnerLost) -> None:
        """Starts another learner in place of one that died, on the port that workers know if it is
        free there.

        Raises:
            LearnerLost: if that one dies too before it serves.
            RestartsUsedUp: if the run allows no more.
            ResourcesNotMet: if there is no room for it.
        """
        learner, self._learner = self._learner, None
        self._forget_learner()
        if learner is not None:
            learner.kill()
        if self._launcher.colocated:
            self.fleet.await_process(error)
        state = self._await_room(error)
        port = split_address(self.learner_info.address)[1]
        self._begin_learner(self._specs.learner(port), state)
        if self._launcher.colocated:
            self.fleet.enter_process()

    @property
    def _room(self) -> Room:
        return Room(self._group, 0, shared=True)

    def _await_room(self, error: LearnerLost) -> RoomState:
        """Counts the loss of the learner, and waits until there is room for another one."""
        judged, since = False, self.clock.now()
        while (state := self._rooms.state(self._room)).problem != "":
            if state.problem is not None and not judged:
                judged = True
                self._count_restart(error, state)
                self._warn(f"the learner waits for room ({state.problem})")
            allowed_s = self._placement.resources_timeout_s + NOTICED_S
            if self.clock.now() - since > allowed_s:
                raise ResourcesNotMet(
                    f"no room for another learner came within {allowed_s:g} s "
                    f"(placement.resources_timeout_s, and {NOTICED_S:g} s in which Ray notices "
                    f"that a host is gone): {state.problem}; --resume goes on from the last "
                    "checkpoint",
                    details=error.details,
                ) from error
            self.turn()
        if not judged:
            self._count_restart(error, state)
        return state

    def _count_restart(self, error: LearnerLost, state: RoomState) -> None:
        """Counts the end of a learner, or the loss of its host.

        Raises:
            RestartsUsedUp: if there were too many lately.
        """
        self.learner_restarts += 1
        there, place, allowed = state.is_same_life(self._place), self._place, self._limit.allowed
        what = str(error) if there else f"{error}, lost with its host {place.host}"
        count = 0
        if ended_in_pause(self.clock):
            what = f"{error}: it ended while this driver was paused"
        else:
            now = self.clock.now()
            count = self._limit.count_end(place.host, place.node, now, host_is_there=there)
        if count > allowed:
            raise RestartsUsedUp(
                f"{what}; placement.learner_restarts={allowed} is used up, --resume goes on from "
                "the last checkpoint",
                details=error.details,
            ) from error
        self._warn(what + f": restart {count} of {allowed}" * bool(count))

    def _begin_learner(self, spec: LearnerSpec, state: RoomState) -> None:
        """Starts a learner in its room, and waits until it serves."""
        self._forget_learner()
        self._hangs, self._place = HangWatch(), state
        self._timings.table.remove_process(LEARNER)
        try:
            self._learner = self._launcher.start_learner(spec, self._room)
        except ActorLost as error:
            raise _learner_lost(error, "start") from error
        asked_s = time.monotonic()
        info = self.wait_for(self._learner.describe(), timeout_s=self._placement.startup_timeout_s)
        self._timings.add_process(LEARNER, self._learner, asked_s, info.clock_s)
        self._info, self._watch_at, self._answers_since = info, 0.0, self.clock.now()

    def _forget_learner(self) -> None:
        """Drops what was heard of a learner; the next one is asked nothing before it serves."""
        self._health, self._watch, self._watch_at = None, None, math.inf
        self._answers_since = math.inf

    def make_fleet(self, events: FleetEvents) -> WorkerFleet:
        """A fleet without workers."""
        self._fleet = WorkerFleet(
            self._placement,
            self._launcher,
            lambda name: self._specs.worker(name, self.learner_info.address),
            events,
            self._timings,
            rooms=self._rooms,
            clock=self.clock,
            capacity=self._rollout.worker_groups,
            relay_fanout=self._weights.relay_fanout,
            learner_answers_s=lambda: max(0.0, self.clock.now() - self._answers_since),
        )
        return self._fleet

    def start_workers(self) -> None:
        """Starts the rollout workers that the run begins with, and waits until each is ready.

        Those that an interrupted try has started are kept.
        """
        count = self._rollout.workers.at_start
        for index in range(len(self.fleet.workers), count):
            self.fleet.add(Room(self._group, index + 1, shared=True))
        deadline = self.clock.now() + self._placement.startup_timeout_s
        while len(self.fleet.ready()) < count:
            self.turn()
            if self.clock.now() > deadline:
                ready = {worker.name for worker in self.fleet.ready()}
                missing = sorted(self.fleet.workers.keys() - ready)
                raise NoAnswer(
                    f"{', '.join(missing)} did not start within placement.startup_timeout_s="
                    f"{self._placement.startup_timeout_s:g} s"
                )

    def check_stop(self) -> None:
        """Raises Interrupted after a signal, as every wait does that may be interrupted."""
        self._stop.check()

    def turn(
        self, calls: Collection[Call[object]] = (), *, interruptible: bool = True
    ) -> set[Call[object]]:
        """Looks once at everything under way; returns those of `calls` that have ended.

        Raises:
            Interrupted: after a signal, where the caller lets itself be interrupted.
            LearnerLost: if the learner's process is gone or hangs.
            ActorFailed: if the learner reports a failure of one of its threads.
            WorkersLost: if a worker was lost once too often.
            NoRoomLeft: if none is left, and no room for any.
        """
        if interruptible:
            self._stop.check()
        self.before_turn()
        now = self.clock.now()
        if self._watch is None and self._learner is not None and now > self._watch_at:
            self._watch, self._watch_asked = self._learner.health(), now
        waited = [*calls, *self.background()]
        if self._watch is not None:
            waited.append(self._watch)
        if self._fleet is None:
            ended = wait_for_calls(waited, POLL_S)
        else:
            ended = self._fleet.poll(POLL_S, waited)
        self._check_health(ended)
        return ended & set(calls)

    def _check_health(self, ended: Collection[Call[object]]) -> None:
        """Takes the learner's answer, or notices that there is none."""
        watch = self._watch
        if watch is None:
            return
        if watch not in ended:
            silent_s = min(SILENT_S, self._placement.step_timeout_s)
            now = self.clock.now()
            if now - self._watch_asked > HEARD_S:
                self._answers_since = math.inf
            if now - self._watch_asked > silent_s:
                raise LearnerLost(f"the learner did not answer 'health' within {silent_s:g} s")
            if now - self._watch_asked > QUIET_S and now >= self._look_at:
                self._look_at = now + LOOK_S
                if not self._rooms.state(self._room).is_same_life(self._place):
                    raise LearnerLost(f"the learner and its host {self._place.host} do not answer")
            return
        now = self.clock.now()
        self._watch, self._watch_at = None, now + WATCH_S
        self._health = self._learner_result(watch)
        self._answers_since = min(self._answers_since, now)
        if self._health.problem:
            raise ActorFailed(f"the learner: {self._health.problem}")
        self._hangs.note(self._health.activity, time.monotonic())
        if hang := self._hangs.hang(self._placement.step_timeout_s):
            raise LearnerLost(f"the learner: {hang}")

    def ended(self, calls: Collection[Call[T]]) -> set[Call[T]]:
        """Those of some calls that have ended; waits for none."""
        done = wait_for_calls(calls, 0.0)
        return {call for call in calls if call in done}

    def wait_for(self, call: Call[T], *, timeout_s: float, interruptible: bool = True) -> T:
        """Waits for a call of the learner, while the workers go on.

        Args:
            interruptible: whether a signal ends the wait; an update is waited for, so that the
                run state has what it trained on.

        Raises:
            LearnerLost: if its process is gone.
            ActorFailed: if it raised an error of its own.
            NoAnswer: naming the method.
        """
        deadline = self.clock.now() + timeout_s
        while call not in self.turn([call], interruptible=interruptible):
            if self.clock.now() > deadline:
                raise NoAnswer(f"{call.who} did not answer {call.method!r} within {timeout_s:g} s")
        return self._learner_result(call)

    def step_timings(self) -> RunTiming:
        """What every process did since the last call, up to the moment of this one.

        Raises:
            LearnerLost: if the learner's process is gone or silent; it answers while it works.
        """
        there = {worker.name: handle for worker, handle in self.fleet.running()}
        try:
            return self._timings.collect(
                {LEARNER: self.learner, **there},
                [LEARNER, *self.fleet.workers],
                timeout_s=min(SILENT_S, self._placement.step_timeout_s),
                check=self._stop.check,
            )
        except ActorLost as error:
            raise _learner_lost(error, "take_timing") from error
        except NoAnswer as error:
            raise LearnerLost(str(error)) from error

    def learner_status(self) -> LearnerStatus | None:
        """The learner as it last reported; None before the first serves."""
        return learner_status(self._info, self._health, self.learner_restarts)

    def memory(self) -> dict[str, ProcessMemory]:
        """The memory of the processes that have reported it, by name."""
        held = {worker.name: worker.memory for worker in self.fleet.workers.values()}
        held[LEARNER] = None if self._health is None else self._health.memory
        return {name: memory for name, memory in held.items() if memory is not None}

    def tables(self) -> dict[str, Any]:
        """What is known of actors and queues, as plain values; no process is waited for long."""
        tables: dict[str, Any] = {"fleet": [] if self._fleet is None else self._fleet.table()}
        if self._learner is not None:
            call = self._learner.health()
            if wait_for_calls([call], ASK_S):
                with contextlib.suppress(ActorLost, ActorFailed):
                    tables["buffer"] = dataclasses.asdict(call.result())
        return tables | {"elsewhere": self._elsewhere()}

    def _elsewhere(self) -> dict[str, dict[str, str]]:
        """Stacks and logs of the processes on other hosts that still answer, by process."""
        here = socket.gethostname()
        asked: dict[Call[dict[str, str]], str] = {}
        if self._learner is not None and self._info is not None and self._info.host != here:
            asked[self._learner.evidence()] = f"{LEARNER} on {self._info.host}"
        for worker, handle in [] if self._fleet is None else self._fleet.running():
            if worker.info is not None and worker.info.host != here:
                asked[handle.evidence()] = f"{worker.name} on {worker.info.host}"
        found: dict[str, dict[str, str]] = {who: {} for who in asked.values()}
        ended = wait_for_calls(asked, ASK_S, every=True)
        for call, who in asked.items():
            if call in ended:
                with contextlib.suppress(ActorLost, ActorFailed):
                    found[who] = call.result()
        return found

    def shutdown(self, grace_s: float = 10.0) -> list[Saved]:
        """Ends every actor; what does not end by itself in time is killed.

        Args:
            grace_s: for each; a learner that writes a checkpoint gets CLOSE_S more.

        Returns:
            Checkpoints that ended since the learner's last report.
        """
        learner, self._learner = self._learner, None
        closing = None if learner is None else learner.close()
        if self._fleet is not None:
            self._fleet.shutdown(grace_s)
        if learner is None or closing is None:
            return []
        try:
            return self._await_close(learner, closing, grace_s)
        finally:
            learner.kill()

    def _await_close(
        self, learner: LearnerHandle, closing: Call[list[Saved]], grace_s: float
    ) -> list[Saved]:
        """Waits for a learner to end, and asks it meanwhile: unasked it would end itself."""
        bound_s, saving, since = grace_s, None, self.clock.now()
        while closing not in wait_for_calls([closing], WATCH_S):
            asked = learner.health()
            if saving is None and asked in wait_for_calls([closing, asked], ASK_S):
                with contextlib.suppress(ActorLost, ActorFailed):
                    saving = asked.result().saving
                if saving is not None:
                    bound_s += CLOSE_S
                    self._warn(f"waits up to {CLOSE_S:g} s for the checkpoint of step {saving}")
            if self.clock.now() - since > bound_s:
                if saving is not None:
                    self._warn(
                        f"the checkpoint of step {saving} was not complete within {CLOSE_S:g} s"
                    )
                return []
        try:
            return closing.result()
        except ActorLost:
            return []
        except ActorFailed as error:
            self._warn(str(error))
            return []

    def _learner_result(self, call: Call[T]) -> T:
        try:
            return call.result()
        except ActorLost as error:
            raise _learner_lost(error, call.method) from error


def learner_status(
    info: LearnerInfo | None, health: LearnerHealth | None, restarts: int
) -> LearnerStatus | None:
    """What is shown of the learner; None before the first serves.

    Args:
        health: None where it was not asked yet.
        restarts: how often another one took its place.
    """
    if info is None:
        return None
    return LearnerStatus(
        doing=STARTING if health is None else health.doing,
        policy_version=-1 if health is None else health.policy_version,
        issued_version=-1 if health is None else health.issued_version,
        host=info.host,
        pid=info.pid,
        devices=info.devices,
        restarts=restarts,
        **memory_fields(None if health is None else health.memory),
    )


def _learner_lost(error: ActorLost, method: str) -> LearnerLost:
    return LearnerLost(f"the learner died during {method!r}: {error}", details=error.details)
