"""Processes whose clocks differ and that answer late: every step's seconds add up."""

from typing import Any, cast

import pytest

from driver.accounting.awake_clock import AwakeClock
from driver.fleet.actor_calls import ActorLost
from driver.fleet.timing_collector import TimingCollector
from services.process.phase_clock import PhaseClock
from services.process.phases import LEARNER


class Time:
    def __init__(self, s: float):
        self.s = s

    def __call__(self) -> float:
        return self.s


class Process:
    """The handle of a process whose clock is behind the driver's by `behind_s`."""

    def __init__(self, driver: Time, behind_s: float):
        self._driver = driver
        self._behind_s = behind_s
        self.clock = PhaseClock(lambda: driver.s - behind_s)
        self.late_s = 0.0
        self.alive = True

    @property
    def clock_s(self) -> float:
        return self._driver.s - self._behind_s

    def take_timing(self, until_s: float):
        return Answer(self, until_s)


class Answer:
    """A call whose result is made when it is read, or at once by a process that is not busy."""

    def __init__(self, process: Process, until_s: float):
        self._process = process
        self._until_s = until_s
        self._timing = None if process.late_s else process.clock.take_timing(until_s)

    def result(self):
        if not self._process.alive:
            raise ActorLost("gone")
        return self._timing or self._process.clock.take_timing(self._until_s)


class Run:
    """A learner and workers under one TimingCollector, in made-up time."""

    def __init__(self, monkeypatch, behind_s: dict[str, float]):
        self.now = Time(1_000.0)
        monkeypatch.setattr("driver.fleet.timing_collector.time.monotonic", self.now)
        monkeypatch.setattr("driver.fleet.timing_collector.wait_for_calls", self._wait)
        self.silent: set[str] = set()
        self.collector = TimingCollector(AwakeClock())
        self.processes: dict[str, Process] = {}
        for name, seconds in behind_s.items():
            self.start(name, seconds)

    def start(self, name: str, behind_s: float = 0.0) -> None:
        process = self.processes[name] = Process(self.now, behind_s)
        self.collector.add_process(name, cast(Any, process), self.now.s, process.clock_s)

    def collect(self, check=lambda: None):
        processes: Any = self.processes
        return self.collector.collect(processes, [*processes], timeout_s=60.0, check=check)

    def work(self, seconds: float) -> None:
        """Every process decodes so long."""
        with Decoding(process.clock for process in self.processes.values()):
            self.now.s += seconds

    def _wait(self, calls, timeout_s):
        """Each call ends as late as its process says, which is busy in between."""
        speaking = [c for c in calls if self._name(c) not in self.silent]
        if not speaking:
            self.now.s += timeout_s
            return set()
        call = min(speaking, key=lambda c: c._process.late_s)
        with Decoding(process.clock for process in self.processes.values()):
            self.now.s += call._process.late_s
        return {call}

    def _name(self, call: Answer) -> str:
        return next(name for name, one in self.processes.items() if one is call._process)


class Decoding:
    """All clocks in phase decode."""

    def __init__(self, clocks):
        self._phases = [clock.phase("decode") for clock in clocks]

    def __enter__(self):
        for phase in self._phases:
            phase.__enter__()

    def __exit__(self, *error):
        for phase in reversed(self._phases):
            phase.__exit__(None, None, None)


@pytest.mark.parametrize("behind_s", [0.0, 700.0, -700.0], ids=["same host", "behind", "ahead"])
def test_late_answers_count_no_second_twice(monkeypatch, behind_s):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": behind_s})
    before_s = run.collect().at_s
    for late_s in (0.0, 0.25, 3.0, 0.0, 0.5):
        run.processes["rollout-0"].late_s = late_s
        run.work(8.0)
        timings = run.collect()
        assert timings.gaps == frozenset()
        assert timings.by_process["rollout-0"].ahead_s == pytest.approx(behind_s, abs=1e-9)
        for seconds in timings.seconds().values():
            assert sum(seconds.values()) == pytest.approx(timings.at_s - before_s, abs=1e-9)
            assert seconds["decode"] == pytest.approx(timings.at_s - before_s, abs=1e-9)
        before_s = timings.at_s


def test_a_silent_worker_has_a_gap_and_the_next_step_is_whole_again(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    run.collect()
    run.silent = {"rollout-0"}
    run.work(8.0)
    timings = run.collect()
    assert timings.silent == timings.gaps == {"rollout-0"} and timings.seconds()["rollout-0"] == {}
    assert 5.0 <= run.now.s - timings.at_s < 6.0, "it was waited for"
    run.silent = set()
    run.processes["rollout-0"].clock.take_timing(
        timings.at_s
    )  # the request that was still in its queue
    run.work(8.0)
    later = run.collect()
    assert later.gaps == frozenset()
    assert sum(later.seconds()["rollout-0"].values()) == later.at_s - timings.at_s


def test_a_process_that_joined_or_left_has_a_gap_and_its_last_seconds_count(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    assert run.collect().gaps == {LEARNER, "rollout-0"}, "both have just joined"
    run.work(4.0)
    run.collector.request("rollout-0", run.processes.pop("rollout-0"), run.now.s)
    run.collector.table.remove_process("rollout-0")
    run.start("rollout-1")
    run.work(2.0)
    monkeypatch.setattr(Run, "_name", lambda self, call: "any")
    timings = run.collect()
    assert timings.gaps == {"rollout-0", "rollout-1"}
    decode_s = {name: seconds["decode"] for name, seconds in timings.seconds().items()}
    assert decode_s == {LEARNER: 6.0, "rollout-0": 4.0, "rollout-1": 2.0}
    run.work(1.0)
    assert run.collect().gaps == frozenset()


@pytest.mark.parametrize("behind_s", [0.0, 700.0], ids=["same host", "behind"])
def test_seconds_of_a_new_process_before_the_step_count_in_no_step(monkeypatch, behind_s):
    run = Run(monkeypatch, {LEARNER: 0.0})
    run.collect()
    process = Process(run.now, behind_s)
    with Decoding([process.clock]):
        run.work(4.0)
        asked_s = run.now.s
        closed_s = run.collect().at_s
        run.work(0.5)  # until the driver sees that it is ready
    clock_s = process.clock_s
    run.processes["rollout-0"] = process
    run.collector.add_process("rollout-0", cast(Any, process), asked_s, clock_s)
    run.work(2.0)
    timings = run.collect()
    assert timings.gaps == {"rollout-0"}
    for seconds in timings.seconds().values():
        assert sum(seconds.values()) == pytest.approx(timings.at_s - closed_s, abs=1e-9)


def test_timings_that_arrived_before_the_learner_died_are_in_the_next_step(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    start_s = run.collect().at_s
    run.work(4.0)
    run.processes[LEARNER].alive, run.processes[LEARNER].late_s = False, 1.0
    with pytest.raises(ActorLost):
        run.collect()
    run.start(LEARNER)
    run.work(2.0)
    timings = run.collect()
    assert timings.gaps == {LEARNER}
    seconds = timings.seconds()["rollout-0"]
    assert sum(seconds.values()) == timings.at_s - start_s == seconds["decode"]


def test_a_signal_ends_the_wait_and_loses_nothing(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    start_s = run.collect().at_s
    run.work(4.0)
    run.processes[LEARNER].late_s = 1.0

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.collect(check=interrupt)
    timings = run.collect()
    for seconds in timings.seconds().values():
        assert sum(seconds.values()) == timings.at_s - start_s


def test_a_learner_that_does_not_answer_is_named(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    run.silent = {LEARNER}
    with pytest.raises(Exception, match="the learner did not answer 'take_timing' within 60 s"):
        run.collect()
    run.processes[LEARNER].alive = False
    run.silent = set()
    run.start(LEARNER)
    assert run.collect().seconds()[LEARNER], "the one before is not asked any more"
