"""Timings of processes whose clocks differ and who answer late: every step's seconds add up."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.accounting.step_timing import LEARNER, ClockGap, TimingCollector, TimingTable
from services.process.phase_clock import PhaseClock


class Time:
    def __init__(self, s: float):
        self.s = s

    def __call__(self) -> float:
        return self.s


class Process:
    """A process whose clock is behind the driver's by `behind_s`, and its Ray handle: a call is its
    result."""

    def __init__(self, driver: Time, behind_s: float):
        self._driver = driver
        self._behind_s = behind_s
        self.clock = PhaseClock(lambda: driver.s - behind_s)
        self.late_s = 0.0
        self.take_timing = self
        self.alive = True

    def about(self) -> dict[str, float]:
        return {"clock_s": self._driver.s - self._behind_s}

    def remote(self, until_s: float):
        return Answer(self, until_s)


class Answer:
    def __init__(self, process: Process, until_s: float):
        self._process = process
        self._until_s = until_s

    def get(self):
        if not self._process.alive:
            raise ConnectionError("gone")
        return self._process.clock.take_timing(self._until_s)


class Run:
    """A learner and workers under one TimingCollector, in made-up time."""

    def __init__(self, monkeypatch, behind_s: dict[str, float]):
        self.now = Time(1_000.0)
        monkeypatch.setattr("driver.accounting.step_timing.time.monotonic", self.now)
        monkeypatch.setattr("driver.accounting.step_timing.GONE", (ConnectionError,))
        monkeypatch.setattr("driver.accounting.step_timing.ray.wait", self._wait)
        monkeypatch.setattr(
            "driver.accounting.step_timing.ray_actors.result_of", lambda call, who, what: call.get()
        )
        self.silent: set[str] = set()
        self.taker = TimingCollector()
        self.processes: dict[str, Process] = {}
        for name, seconds in behind_s.items():
            self.start(name, seconds)

    def start(self, name: str, behind_s: float = 0.0) -> None:
        process = self.processes[name] = Process(self.now, behind_s)
        self.taker.book.came(name, self.now.s, process.about())

    def take(self, check=lambda: None):
        return self.taker.take(self.processes, [*self.processes], timeout_s=60.0, check=check)

    def work(self, seconds: float) -> None:
        """Every process decodes so long."""
        with Decoding(process.clock for process in self.processes.values()):
            self.now.s += seconds

    def _wait(self, calls, timeout):
        """Each call ends as late as its process says, which is busy in between."""
        speaking = [c for c in calls if self._name(c) not in self.silent]
        if not speaking:
            self.now.s += timeout
            return [], calls
        call = min(speaking, key=lambda c: c._process.late_s)
        with Decoding(process.clock for process in self.processes.values()):
            self.now.s += call._process.late_s
        return [call], [c for c in calls if c is not call]

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
    before_s = run.take().at_s
    for late_s in (0.0, 0.25, 3.0, 0.0, 0.5):
        run.processes["rollout-0"].late_s = late_s
        run.work(8.0)
        timings = run.take()
        assert timings.gaps == frozenset()
        assert timings.by_process["rollout-0"].ahead_s == pytest.approx(behind_s, abs=1e-9)
        for seconds in timings.seconds().values():
            assert sum(seconds.values()) == pytest.approx(timings.at_s - before_s, abs=1e-9)
            assert seconds["decode"] == pytest.approx(timings.at_s - before_s, abs=1e-9)
        before_s = timings.at_s


def test_a_worker_that_says_nothing_has_a_gap_and_the_next_step_is_whole_again(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    run.take()
    run.silent = {"rollout-0"}
    run.work(8.0)
    timings = run.take()
    assert timings.silent == timings.gaps == {"rollout-0"} and timings.seconds()["rollout-0"] == {}
    assert 5.0 <= run.now.s - timings.at_s < 6.0, "it was waited for"
    run.silent = set()
    run.processes["rollout-0"].clock.take_timing(
        timings.at_s
    )  # the question that was still in its queue
    run.work(8.0)
    later = run.take()
    assert later.gaps == frozenset()
    assert sum(later.seconds()["rollout-0"].values()) == later.at_s - timings.at_s


def test_who_came_or_went_has_a_gap_and_its_last_seconds_count(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    assert run.take().gaps == {LEARNER, "rollout-0"}, "both have just come"
    run.work(4.0)
    run.taker.ask("rollout-0", run.processes.pop("rollout-0"), run.now.s)
    run.taker.book.gone("rollout-0")
    run.start("rollout-1")
    run.work(2.0)
    monkeypatch.setattr(Run, "_name", lambda self, call: "any")
    timings = run.take()
    assert timings.gaps == {"rollout-0", "rollout-1"}
    decode_s = {name: seconds["decode"] for name, seconds in timings.seconds().items()}
    assert decode_s == {LEARNER: 6.0, "rollout-0": 4.0, "rollout-1": 2.0}
    run.work(1.0)
    assert run.take().gaps == frozenset()


def test_what_was_told_before_the_learner_died_is_in_the_next_step(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    start_s = run.take().at_s
    run.work(4.0)
    run.processes[LEARNER].alive, run.processes[LEARNER].late_s = False, 1.0
    with pytest.raises(ConnectionError):
        run.take()
    run.start(LEARNER)
    run.work(2.0)
    timings = run.take()
    assert timings.gaps == {LEARNER}
    seconds = timings.seconds()["rollout-0"]
    assert sum(seconds.values()) == timings.at_s - start_s == seconds["decode"]


def test_a_signal_ends_the_wait_and_loses_nothing(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    start_s = run.take().at_s
    run.work(4.0)
    run.processes[LEARNER].late_s = 1.0

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.take(check=interrupt)
    timings = run.take()
    for seconds in timings.seconds().values():
        assert sum(seconds.values()) == timings.at_s - start_s


def test_a_learner_that_does_not_answer_is_named(monkeypatch):
    run = Run(monkeypatch, {LEARNER: 0.0, "rollout-0": 0.0})
    run.silent = {LEARNER}
    with pytest.raises(Exception, match="the learner did not answer 'take_timing' within 60 s"):
        run.take()


@given(
    st.floats(-1e5, 1e5),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), min_size=1, max_size=20),
)
def test_a_gap_stays_within_what_every_answer_proves(true_s, ways_s):
    """Answers of a process whose clock runs as the driver's: what is learned holds for all."""
    gap, now = ClockGap(), 1e5
    for to_s, back_s in ways_s:
        now += 1.0
        gap.learn(now, now + to_s - true_s, now + to_s + back_s)
        now += to_s + back_s
    tightest_s = min(to_s + back_s for to_s, back_s in ways_s)
    assert abs(gap.seconds - true_s) <= tightest_s + 1e-4 * (now - 1e5) + 1e-6


def test_a_gap_of_one_host_is_none_from_the_start():
    gap = ClockGap()
    for asked_s, late_s in itertools.product((10.0, 20.0), (0.0, 3.0)):
        gap.learn(asked_s, asked_s + late_s, asked_s + late_s + 0.01)
        assert gap.seconds == 0.0


def test_a_host_that_slept_is_believed_again():
    gap = ClockGap()
    gap.learn(100.0, 50.0, 100.01)
    assert gap.seconds == pytest.approx(50.01)
    gap.learn(200.0, 120.0, 200.01)  # its clock went on for 70 s, ours for 100
    assert 80.0 <= gap.seconds <= 80.01


def test_a_book_forgets_what_an_earlier_process_of_that_name_told():
    book = TimingTable()
    clock = PhaseClock()
    book.came("rollout-0", clock.take_timing().taken_s, {"clock_s": clock.take_timing().taken_s})
    book.hear("rollout-0", clock.take_timing(), clock.take_timing().taken_s)
    book.came("rollout-0", clock.take_timing().taken_s, {"clock_s": clock.take_timing().taken_s})
    timings = book.close(0.0, ["rollout-0"])
    assert timings.silent == timings.gaps == {"rollout-0"}
