"""A whole run of the driver whose learner, workers, hosts and time are made up.

Everything of the driver is real down to `LearnerHandle`, `WorkerHandle` and `Rooms`: those are
played by a `World`, in which nothing happens but while the driver waits. A group that a worker has
pushed is kept whatever dies, as the learner's record keeps it.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import pathlib
import signal
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from driver import run as driver_run
from driver.config.run_config import RunConfig
from driver.fleet.actor_calls import ActorLost
from driver.fleet.rooms import RoomState
from learner.durable.saved import Saved
from learner.learner_records import (
    LearnerHealth,
    LearnerInfo,
    RecordedUpdate,
    Restored,
    UpdateReport,
)
from rollout_worker.data.data_digests import digest_data
from rollout_worker.data.prompts import PromptSet
from rollout_worker.rewards.spending import Spending
from rollout_worker.worker_records import (
    EvalItem,
    LeaseOutcome,
    LeaseResult,
    News,
    Orders,
    WorkerInfo,
)
from services.control.messages import WorkerState
from services.process.activity import Activity
from services.process.phase_clock import PhaseClock
from services.process.process_memory import ProcessMemory
from services.trajectories.buffer_records import BufferCounts
from services.trajectories.data_order import DataOrder
from services.trajectories.group_report import GroupReport
from services.wire.messages import NO_VERSION

READY_S, GROUP_S, UPDATE_S, EVALUATE_S, SAVE_S = 5.0, 2.0, 1.0, 3.0, 4.0
RAY_NOTICES_S = 40.0
"""After the death of a host, until Ray knows of it and moves the rooms to another one."""
DATA = digest_data([PromptSet(prompts=(), overlong=0)])
MEMORY = ProcessMemory(host_bytes=1)
IDLE = Activity(doing="idle", counters={})
MOMENT = datetime.datetime(2026, 1, 31, 23, 59, 59, tzinfo=datetime.UTC)
WEEK_S = 7 * 86_400.0
GROUPS, WORKERS, PROMPTS = 4, 2, 1_000
"""Groups of a step, workers, and prompts."""


class Host:
    def __init__(self, name: str):
        self.name = name
        self.life = f"{name}/1"
        self.up = True
        self.known_up = True


class World:
    """Hosts, processes and time; `fault(place)` may raise wherever a call of the driver's may."""

    def __init__(self, hosts: str = "learner a b"):
        self.now_s = 1_000.0
        self.hosts = {name: Host(name) for name in hosts.split()}
        self.bundles = dict(enumerate([*self.hosts][: WORKERS + 1]))
        """Host of each room; empty for one that lies nowhere."""
        self.due: list[tuple[float, Callable[[], object]]] = []
        self.fault: Callable[[str], None] = lambda place: None
        self.on_turn: Callable[[], None] = lambda: None
        self.processes: list[Process] = []
        self.groups: dict[str, GroupReport] = {}
        self.updates: list[RecordedUpdate] = []
        self.trained: list[str] = []
        self.saved: tuple[int, dict[str, Any]] | None = None
        self.scores: dict[int, dict[int, float | None]] = {}
        """That the learner was given with the checkpoint of each step."""
        self.pushed: list[str] = []
        self.ports: list[int | None] = []
        self.moments: list[datetime.datetime] = []
        """That workers were started with."""
        self.restore_s = 1.0
        self.save_problem = ""
        """Why the next checkpoint cannot be written."""
        self.save_s = SAVE_S
        self.close_s = 0.1
        """How long the learner takes to end."""
        self.left: list[str] = []
        """What each checkpoint cannot remove."""
        self.deadly: set[str] = set()
        """Groups whose completion ends a worker."""
        self.reward_error = ""
        """Of every completion from now on."""
        self.evaluated: list[tuple[str, Any, int]] = []
        """Worker, request and leases that it held, of each share of an evaluation."""
        self.equal: set[int] = set()
        """Positions of prompts whose groups have equal rewards."""
        self.forgetful = False
        """Workers keep no policy version for an evaluation."""
        self.update_s, self.evaluate_s = UPDATE_S, EVALUATE_S
        self.group_cost = 0.0
        """What a judge takes for a group."""
        self.without_folder: set[str] = set()
        """Hosts on which the run's folder is not there."""

    def at(self, after_s: float, do: Callable[[], object]) -> None:
        """Has something happen later."""
        self.due.append((self.now_s + after_s, do))

    def pass_time(self, seconds: float) -> None:
        """Lets time go by, with what is due in it."""
        end_s = self.now_s + seconds
        while self.due and min(self.due, key=lambda one: one[0])[0] <= end_s:
            first = min(self.due, key=lambda one: one[0])
            self.due.remove(first)
            self.now_s = max(self.now_s, first[0])
            first[1]()
        self.now_s = max(self.now_s, end_s)

    def lose_host(self, name: str, *, silently: bool = False) -> None:
        """Ends a host; Ray notices it later, and moves its rooms where a host has none.

        Args:
            silently: not even the end of connections is sent.
        """
        host = self.hosts[name]
        host.up = False
        gone = [process for process in self.processes if process.host is host]
        for process in gone:
            process.stopped = True
            if not silently:
                process.end()

        def notice():
            host.known_up = False
            for process in gone:
                process.end()
            for bundle, where in self.bundles.items():
                if where == name:
                    self.bundles[bundle] = ""
            self._place()

        self.at(RAY_NOTICES_S, notice)

    def stop(self, name: str, seconds: float) -> None:
        """Has a process answer nothing for a while, as SIGSTOP does."""
        process = self.process(name)
        process.stopped, process.stopped_at_s = True, self.now_s

        def go_on():
            process.stopped, process.stopped_at_s = False, math.inf

        self.at(seconds, go_on)

    def add_host(self, name: str) -> None:
        self.hosts[name] = Host(name)
        self.hosts[name].life = f"{name}/{self.now_s}"
        self._place()

    def _place(self) -> None:
        taken = set(self.bundles.values())
        free = [one.name for one in self.hosts.values() if one.up and one.name not in taken]
        for bundle, where in self.bundles.items():
            if not where and free:
                self.bundles[bundle] = free.pop(0)

    def end_newest(self, name: str) -> None:
        """Ends the newest process of a name, if there was one."""
        for process in [one for one in self.processes if one.name == name][-1:]:
            process.end()

    def process(self, name: str) -> "Process":
        """The newest of a name."""
        return [one for one in self.processes if one.name == name][-1]

    def state(self, room: Any) -> RoomState:
        """As `Rooms.state`."""
        self.fault("rooms.state")
        where = self.bundles[room.bundle]
        if not where:
            return RoomState(problem="no host of the Ray cluster has 1 CPU free")
        host = self.hosts[where]
        problem = "" if host.up else f"{where} does not answer"
        return RoomState(node=host.life, host=where, problem=problem)

    colocated = False

    def start_learner(self, spec: Any, room: Any) -> "Learner":
        self.fault("start_learner")
        self.ports.append(spec.earlier_port)
        host = self.hosts[self.bundles[room.bundle]]
        if not host.up:
            self.pass_time(1.0)  # else a driver that tries it again and again stops the time
        return Learner(self, "learner", host)

    def start_worker(self, spec: Any, room: Any) -> tuple["Worker", "Answer"]:
        self.fault("start_worker")
        self.moments.append(spec.moment)
        worker = Worker(self, spec.name, self.hosts[self.bundles[room.bundle]])
        return worker, worker.call("start", READY_S, worker.describe)

    def wait(self, calls: Any, timeout_s: float, *, every: bool = False) -> set[Any]:
        """As `wait_for_calls`."""
        self.on_turn()
        end_s = self.now_s + timeout_s
        while self.now_s < end_s and not any(call.has_ended for call in calls):
            self.pass_time(min(0.1, end_s - self.now_s))
        return {call for call in calls if call.has_ended}


class Process:
    """An actor on a host."""

    def __init__(self, world: World, name: str, host: Host):
        self.world = world
        self.name = name
        self.host = host
        self.alive = host.up
        self.stopped = False
        self.stopped_at_s = math.inf
        self.activity = IDLE
        self.clock = PhaseClock(lambda: world.now_s)
        world.processes.append(self)

    def end(self) -> None:
        self.alive = False

    def call(self, method: str, seconds: float, make: Callable[[], Any]) -> "Answer":
        return Answer(self, method, seconds, make)

    def take_timing(self, until_s: float) -> "Answer":
        return self.call("take_timing", 0.0, lambda: self.clock.take_timing(until_s))

    def evidence(self) -> "Answer":
        return self.call("evidence", 0.1, lambda: {"stacks.txt": f"of {self.name}"})

    def close(self) -> "Answer":
        return self.call("close", 0.1, self.end)

    def kill(self) -> None:
        self.end()


class Answer:
    """A call: ends after a while, or with its process."""

    def __init__(self, process: Process, method: str, seconds: float, make: Callable[[], Any]):
        self.who, self.method = process.name, method
        self._process = process
        self._make = make
        self._value: tuple[Any] | None = None
        process.world.at(seconds, self._end)

    def _end(self) -> None:
        if self._process.stopped:
            self._process.world.at(1.0, self._end)
        elif self._process.alive and self._value is None:
            self._value = (self._make(),)

    @property
    def has_ended(self) -> bool:
        return self._value is not None or not self._process.alive

    def result(self) -> Any:
        self._process.world.fault(f"{self._process.name} {self.method}")
        if self._value is None:
            raise ActorLost("its process ended unexpectedly", details="of Ray")
        return self._value[0]


class Worker(Process):
    def __init__(self, *process: Any):
        super().__init__(*process)
        self._held: dict[str, tuple[Any, int]] = {}
        self._results: list[LeaseResult] = []
        self._draining = False
        self._keeps = NO_VERSION
        self._spent = Spending()
        self._stopped_spending = ""

    def describe(self) -> WorkerInfo:
        return WorkerInfo(
            name=self.name,
            host=self.host.name,
            pid=1,
            devices="1 x made up",
            address=f"{self.host.name}:1",
            slots=8,
            data=DATA,
            clock_s=self.world.now_s,
        )

    def order(self, orders: Orders) -> None:
        if orders.keep_version is not None:
            self._keeps = orders.keep_version
        self._stopped_spending = orders.stop_spending or self._stopped_spending
        for group_id in orders.cancel:
            self._held.pop(group_id, None)
        for lease in orders.leases:
            held = (lease, orders.number)
            self._held[lease.group_id] = held
            self.world.at(GROUP_S, lambda lease=lease, held=held: self._push(lease, held))

    def _push(self, lease: Any, held: tuple[Any, int]) -> None:
        if not self.alive or self._held.get(lease.group_id) is not held:
            return
        if self.stopped or not self.world.process("learner").alive:
            self.world.at(1.0, lambda: self._push(lease, held))
            return
        if lease.group_id in self.world.deadly:
            self.end()
            return
        del self._held[lease.group_id]
        error = self.world.reward_error
        if self.world.group_cost and not error:
            error = self._stopped_spending
            if not error:
                self._spent += Spending(requests=2, cost=self.world.group_cost)
        report = GroupReport(
            group_id=lease.group_id,
            attempt=lease.attempt,
            policy_version=lease.min_policy_version,
            worker=self.name,
            zero_variance=lease.position in self.world.equal,
            scored=0 if error else 2,
            reward_sum=0.0 if error else 1.0,
            reward_error=error,
            completion_tokens=10,
        )
        new = lease.group_id not in self.world.pushed
        if new:
            self.world.pushed.append(lease.group_id)
            self.world.groups[lease.group_id] = report
        self._results.append(
            LeaseResult(
                group_id=lease.group_id,
                attempt=lease.attempt,
                order_number=held[1],
                outcome=LeaseOutcome.ACCEPTED if new else LeaseOutcome.DUPLICATE,
                report=report,
            )
        )

    def news(self, wait_s: float) -> Answer:
        return self.call("news", min(0.5, wait_s), self._news)

    def _news(self) -> News:
        results, self._results = self._results, []
        spent, self._spent = self._spent, Spending()
        learner = self.world.process("learner")
        return News(
            drained=False,
            policy_version=learner.version,
            kept_version=NO_VERSION if self.world.forgetful else self._keeps,
            weight_digest="",
            canary_gap=0.0,
            held=len(self._held),
            results=tuple(results),
            background_s={},
            transfers=(),
            memory=MEMORY,
            spent=spent,
            learner_silent_s=max(0.0, self.world.now_s - learner.stopped_at_s),
            activity=self.activity,
        )

    def evaluate(self, request: Any) -> Answer:
        self.world.evaluated.append((self.name, request, len(self._held)))
        items = [
            eval_item(at, version=request.policy_version)
            for at in request.positions
            for _ in range(request.samples)
        ]
        return self.call("evaluate", self.world.evaluate_s, lambda: items)


def eval_item(position: int, *, version: int = 0) -> EvalItem:
    return EvalItem(
        prompt_id=position,
        sample_index=0,
        question="q",
        answer="a",
        completion="c",
        completion_tokens=1,
        finish_reason="stop",
        rewards={"gsm8k_answer": 1.0, "gsm8k_answer/strict": 1.0, "gsm8k_answer/lenient": 1.0},
        total_reward=1.0,
        reward_error="",
        policy_version=version,
    )


class Learner(Process):
    def __init__(self, *process: Any):
        super().__init__(*process)
        self.version = 0
        self._saving: tuple[int, Callable[[], None]] | None = None
        """Step of the checkpoint that is being written in the background, and what completes it."""
        self._ended: list[Saved] = []

    def describe(self) -> Answer:
        return self.call("describe", READY_S, self._describe)

    def _describe(self) -> LearnerInfo:
        return LearnerInfo(
            name="learner",
            host=self.host.name,
            pid=1,
            devices="1 x made up",
            address=f"{self.host.name}:4000",
            sees_output_folder=self.host.name not in self.world.without_folder,
            clock_s=self.world.now_s,
        )

    def restore(self) -> Answer:
        return self.call("restore", self.world.restore_s, self._restore)

    def _restore(self) -> Restored | None:
        world = self.world
        if world.saved is None and not world.groups:
            return None
        step, kept = world.saved or (0, None)
        self.version = step
        in_updates = {group_id for one in world.updates for group_id in one.group_ids}
        waiting = [g for name, g in world.groups.items() if name not in in_updates]
        replay = list(world.updates)
        world.updates = []
        for update in replay:
            for group_id in update.group_ids:
                world.trained.remove(group_id)
        return Restored(
            step=step,
            policy_version=step,
            driver_state=kept,
            skipped=[],
            set_aside=[],
            repaired="",
            replay=replay,
            waiting=waiting,
            issued={n: "" for n in range(step + len(replay) + 1)},
        )

    def publish(self) -> Answer:
        return self.call("publish", 0.1, lambda: self.version)

    def update(self, group_ids: Any, dropped_ids: Any, timeout_s: float) -> Answer:
        return self.call("update", self.world.update_s, lambda: self._update(list(group_ids)))

    def _update(self, group_ids: list[str]) -> UpdateReport:
        if self.world.reward_error:
            return UpdateReport(
                policy_version=self.version,
                digest="",
                metrics={"train/update_skipped": 1.0},
                outcomes=dict.fromkeys(group_ids, "dropped_error"),
                replayed=None,
                disowned=[],
            )
        self.version += 1
        self.world.trained += group_ids
        self.world.updates.append(
            RecordedUpdate(
                policy_version=self.version, group_ids=group_ids, dropped_ids=[], digest=""
            )
        )
        return UpdateReport(
            policy_version=self.version,
            digest="",
            metrics={"train/update_skipped": 0.0, "train/loss": 0.0},
            outcomes=dict.fromkeys(group_ids, "trained"),
            replayed=None,
            disowned=[],
            saved=self._take_ended(),
        )

    def save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> Answer:
        def keep() -> list[Saved]:
            self._finish_saving()
            self._snapshot(step, driver_state, scores)()
            return self._take_ended()

        return self.call("save", 1.0, keep)

    def begin_save(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> Answer:
        def begin() -> None:
            self._finish_saving()
            begun = self._saving = step, self._snapshot(step, driver_state, scores)
            later = lambda: self._finish_saving() if self._saving is begun else None
            self.world.at(self.world.save_s, later)

        return self.call("begin_save", 0.1, begin)

    def end_saving(self) -> Answer:
        return self.call("end_saving", 0.1, self._complete_saving)

    def _complete_saving(self) -> list[Saved]:
        self._finish_saving()
        return self._take_ended()

    def close(self) -> Answer:
        def end() -> list[Saved]:
            ended = self._complete_saving()
            self.end()
            return ended

        return self.call("close", self.world.close_s, end)

    def _snapshot(
        self, step: int, driver_state: dict[str, Any], scores: Mapping[int, float | None]
    ) -> Callable[[], None]:
        """What happens once a checkpoint of this moment is complete."""
        world = self.world
        updates, trained = [*world.updates], [*world.trained]

        def complete() -> None:
            world.saved = (step, driver_state)
            world.updates = [update for update in world.updates if update not in updates]
            world.scores[step] = dict(scores)
            for group_id in trained:
                world.groups.pop(group_id, None)
            self._ended.append(made_up_saved(step, not_removed=world.left))

        def end() -> None:
            if world.save_problem:
                problem, world.save_problem = world.save_problem, ""
                self._ended.append(made_up_saved(step, problem=problem))
            else:
                complete()

        return end

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None and self.alive:
            saving[1]()

    def _take_ended(self) -> list[Saved]:
        ended, self._ended = self._ended, []
        return ended

    def export(self, folder: str) -> Answer:
        return self.call("export", 0.1, lambda: "float32")

    def export_adapter(self, folder: str) -> Answer:
        return self.call("export_adapter", 0.1, lambda: None)

    def reports(self, group_ids: Any) -> Answer:
        groups = self.world.groups
        return self.call("reports", 0.1, lambda: [groups[g] for g in group_ids if g in groups])

    def health(self) -> Answer:
        return self.call("health", 0.1, self._health)

    def _health(self) -> LearnerHealth:
        names = [field.name for field in dataclasses.fields(BufferCounts)]
        return LearnerHealth(
            problem="",
            doing="idle",
            policy_version=self.version,
            issued_version=self.version,
            counts=BufferCounts(**dict.fromkeys(names, 0)),
            memory=MEMORY,
            activity=self.activity,
            saving=None if self._saving is None else self._saving[0],
        )


def made_up_saved(step: int, **fields: Any) -> Saved:
    return Saved(step=step, blocked_s=0.5, write_s=2.0, **fields)


class SimulatedRun:
    """A run of the driver in a world; what it said, and how it ended."""

    def __init__(self, folder: pathlib.Path, world: World, *, steps: int = 6, **changes: Any):
        self.folder = folder
        self.world = world
        self.error: BaseException | None = None
        self.said: list[str] = []
        self.said_at_s: list[float] = []
        self.watched: list[pathlib.Path] = []
        """Folders whose end another process writes if the driver cannot."""
        self.evidence: list[Any] = []
        """What post-mortems were made of."""
        sections: dict[str, dict[str, Any]] = {
            "run": {"name": "made-up", "steps": steps, "output_dir": str(folder)},
            "model": {"path": str(folder)},
            "data": {"train": {"source": "none.jsonl"}, "eval": {"source": "none.jsonl"}},
            "rollout": {"workers": WORKERS, "prompts_per_step": GROUPS},
            "reward": {"functions": [{"name": "gsm8k_answer"}]},
            "checkpoint": {"every_steps": 2, "export_hf": False},
            "eval": {"every_steps": 0, "at_start": False, "at_end": False},
            "log": {
                "dashboard": {"enabled": False},
                "timeline": False,
                "unexplained_fraction": 1.0,
            },
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            sections.setdefault(section, {})[name] = value
        self.config = RunConfig.model_validate(sections)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> "SimulatedRun":
        """Runs to whichever end."""
        world = self.world
        prepared = types.SimpleNamespace(
            order=DataOrder.of_one(0, PROMPTS),
            held_out=(6,),
            moment=MOMENT,
            check_worker=lambda info, data: None,
            place_of=lambda position: f"none.jsonl, line {position + 1}",
            left_out=({"why": "too long", "where": "none.jsonl, line 9"},),
            teacher=None,
            adapter=None,
        )
        say = driver_run.StepView.say
        with monkeypatch.context() as patched:
            patched.setattr("time.monotonic", lambda: world.now_s)
            patched.setattr("time.sleep", sleep_of(world))
            for module in ("fleet.fleet", "fleet.timing_collector", "supervisor"):
                patched.setattr(f"driver.{module}.wait_for_calls", world.wait)
            patched.setattr(driver_run, "connect", lambda *_: [])
            patched.setattr(driver_run, "reserve", lambda *_: None)
            patched.setattr(driver_run, "record_code", lambda *_, **__: None)
            patched.setattr(driver_run, "offer_control", lambda *_, **__: contextlib.nullcontext())
            patched.setattr(driver_run, "collect", lambda *given: self.evidence.append(given[2]))
            patched.setattr(driver_run, "start_end_watch", self.watched.append)
            patched.setattr(driver_run, "Launcher", lambda _: world)
            patched.setattr(driver_run, "RayRooms", lambda: world)
            patched.setattr("ray.shutdown", lambda: None)
            patched.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
            patched.setattr(driver_run.RunAuthority, "create", lambda _: Authority())
            patched.setattr(
                driver_run.StepView,
                "say",
                lambda view, text: (self._note(text), say(view, text)),
            )
            make_fleet = driver_run.Supervisor.make_fleet

            def watched_fleet(supervisor: Any, events: Any) -> Any:
                fleet = make_fleet(supervisor, events)
                world.on_turn = lambda: check_fleet(fleet)
                return fleet

            patched.setattr(driver_run.Supervisor, "make_fleet", watched_fleet)
            before = {number: signal.getsignal(number) for number in (1, 2, 15)}
            self.folder.mkdir(exist_ok=True)
            named: Any = prepared
            try:
                driver_run.run(self.config, self.folder, named)
            except BaseException as error:
                self.error = error
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        return self

    def _note(self, text: str) -> None:
        self.said.append(text)
        self.said_at_s.append(self.world.now_s)

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def ended_in_checkpoint(self, exit_code: int) -> bool:
        """Whether the last closed step is saved, and status.json has it with this end."""
        status, saved = self.status, self.world.saved
        assert saved is not None and status["last_checkpoint"] == status["step"] == saved[0]
        assert status["reason"] == str(self.error), status
        return status["exit_code"] == exit_code

    def said_of(self, *words: str) -> list[str]:
        """Lines that hold all of these words."""
        return [line for line in self.said if all(word in line for word in words)]


def sleep_of(world: World) -> Callable[[float], None]:
    """`time.sleep` of this thread in a world: others, as those of the stacks, sleep as ever."""
    mine, others_sleep = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        (world.pass_time if threading.get_ident() == mine else others_sleep)(seconds)

    return sleep


class Authority:
    """Makes no certificates."""

    def issue(self, name: str) -> None:
        return None


def check_fleet(fleet: Any) -> None:
    """What must hold between any two calls of the driver."""
    for worker in fleet.workers.values():
        if worker.handle is None:
            assert worker.state in (WorkerState.STARTING, WorkerState.DRAINING), worker
            assert worker.call is None and not worker.leases, worker
        else:
            assert worker.call is not None, worker
            assert not worker.waits_for and worker.loss is None, worker
        assert worker.takes_leases <= (worker.handle is not None), worker
