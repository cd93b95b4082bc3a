"""What ledger, timeline and metrics hold of a closed step, with processes that join and leave."""

import io
import math
import pathlib

import pytest
from rich.console import Console

from driver.accounting.intake import IntakeRules
from driver.accounting.jsonl import read_lines
from driver.accounting.ledger import StepLedger
from driver.accounting.run_state import RunState
from driver.accounting.step_timing import RunTiming, TimingTable
from driver.config.load_config import load
from driver.reports.dropped import DroppedLog
from driver.reports.metrics import MetricsLog
from driver.reports.status import StatusFile
from driver.reports.step_report import StepReports
from driver.reports.timeline import Timeline
from driver.terminal.step_table import StepView
from rollout_worker.worker_records import EngineUse, News
from services.process.activity import Activity
from services.process.phase_clock import PhaseClock
from services.process.process_memory import ProcessMemory
from services.trajectories.data_order import DataOrder

DEMO = str(pathlib.Path(__file__).parents[3] / "deploy" / "runs" / "demo_cpu.yaml")
CONFIG = load(DEMO, ["log.unexplained_fraction=0.01"])


class Driver:
    """Reports of a run in simulated time, whose processes report when they are asked."""

    def __init__(self, folder: pathlib.Path, monkeypatch):
        self.now_s = 1_000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)
        self.folder = folder
        self.said = io.StringIO()
        view = StepView("demo", CONFIG.run.steps, Console(file=self.said, width=200))
        self.reports = StepReports(
            CONFIG.run,
            CONFIG.log,
            folder,
            max_staleness=CONFIG.rollout.max_staleness,
            metrics=MetricsLog(folder),
            ledger=StepLedger(folder, unexplained_fraction=0.01, warn=pytest.fail),
            timeline=Timeline(folder, enabled=True),
            dropped=DroppedLog(folder, DataOrder.of_one(0, 8), "prompt {}".format),
            status=StatusFile(folder, run="demo", run_id="r"),
            say=view.say,
            show_step=view.add_step,
        )
        self.reports.start_step(self.now_s)
        self.state = RunState.create(IntakeRules(wanted=2, max_staleness=0), DataOrder.of_one(0, 8))
        self.timings = TimingTable()
        self.clocks: dict[str, PhaseClock] = {}

    def start(self, name: str) -> None:
        self.clocks[name] = PhaseClock(lambda: self.now_s)
        self.timings.add_process(name, self.now_s, self.now_s)

    def work(self, seconds: float, phase: str, *names: str) -> None:
        """Advances time, with these processes in one phase and the others not running."""
        open_phases = [self.clocks[name].phase(phase) for name in names]
        for one in open_phases:
            one.__enter__()
        self.now_s += seconds
        for one in open_phases:
            one.__exit__(None, None, None)

    def close(self, names, late_s: float = 0.0, **metrics: float):
        timings = self.collect(names)
        self.work(late_s, "idle", *self.clocks)
        self.state.step += 1
        memory = {"learner": ProcessMemory(host_bytes=7)}
        return self.reports.close_step(self.state, metrics, timings, memory)

    def collect(self, names) -> RunTiming:
        for name, clock in self.clocks.items():
            self.timings.add_timing(name, clock.take_timing(self.now_s), self.now_s)
        return self.timings.close_step(self.now_s, names)

    def line(self, name: str) -> dict:
        return read_lines(self.folder / f"{name}.jsonl")[-1]


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Driver:
    return Driver(tmp_path, monkeypatch)


def track_s(driver: Driver, process: str) -> float:
    track = driver.line("timeline")["processes"].get(process, {"spans": []})
    return sum(seconds for _, _, seconds in track["spans"])


def test_an_added_worker_counts_from_its_start_and_its_track_agrees(driver):
    driver.start("learner")
    driver.collect(["learner"])
    driver.timings.remove_process("rollout-0")
    driver.work(6.0, "idle", "learner")
    first = driver.close(["learner", "rollout-0"])
    assert first.absent_s == {"rollout-0": 6.0} and first.wall_s == 6.0
    assert sum(first.processes["rollout-0"].values()) == track_s(driver, "rollout-0") == 0.0
    driver.work(3.0, "idle", "learner")
    driver.start("rollout-0")
    driver.work(2.0, "decode", "learner", "rollout-0")
    second = driver.close(["learner", "rollout-0"])
    assert second.absent_s == {"rollout-0": 3.0} and second.warnings == ()
    spent = {phase: s for phase, s in second.processes["rollout-0"].items() if s}
    assert spent == {"decode": 2.0} and track_s(driver, "rollout-0") == 2.0
    driver.work(1.0, "decode", "learner", "rollout-0")
    assert driver.close(["learner", "rollout-0"]).absent_s == {}


def test_a_replacement_learner_has_a_track_as_long_as_its_seconds(driver):
    driver.start("learner")
    driver.collect(["learner"])
    driver.work(4.0, "forward_backward", "learner")
    driver.timings.remove_process("learner")
    driver.work(15.0, "idle")
    driver.start("learner")
    driver.work(2.0, "checkpoint", "learner")
    record = driver.close(["learner"])
    assert record.wall_s == 21.0 and record.absent_s == {"learner": 19.0}
    assert sum(record.processes["learner"].values()) == track_s(driver, "learner") == 2.0


def test_a_step_ends_where_its_timings_do_however_late_it_is_closed(driver):
    driver.start("learner")
    driver.collect(["learner"])
    driver.work(4.0, "idle", "learner")
    assert driver.close(["learner"], late_s=2.5).wall_s == 4.0
    driver.work(1.0, "idle", "learner")
    assert driver.close(["learner"]).wall_s == 3.5
    assert driver.line("metrics")["time/train/step_s"] == 3.5


def test_queues_memory_and_the_rate_are_metrics_of_the_step(driver):
    driver.start("learner")
    driver.start("rollout-0")
    driver.collect(["learner", "rollout-0"])
    driver.reports.queues.record_counts(waiting=2, out=6, policy_version=0)
    driver.work(4.0, "decode", "learner", "rollout-0")
    both = ["learner", "rollout-0"]
    driver.close(both, **{"rollout/tokens": 100.0, "reward/total/mean": 0.5})
    line = driver.line("metrics")
    assert line["mem/learner/host_bytes"] == 7.0 and line["time/rollout-0/decode_s"] == 4.0
    assert (line["queue/waiting_mean"], line["queue/out_max"]) == (2.0, 6.0)
    assert line["throughput/train/decode_tokens_per_s"] == 25.0
    assert line["time/train/step_avg_last10_s"] == 4.0
    assert "mem/rollout-0/host_bytes" not in line, "it has not reported"


def news_of(*, prefilled, reused, parked):
    return News(
        drained=False,
        policy_version=0,
        weight_digest="",
        canary_gap=math.nan,
        held=0,
        results=(),
        background_s={},
        transfers=(),
        memory=ProcessMemory(host_bytes=7),
        engine=EngineUse(
            tokens=prefilled,
            slot_steps=2 * prefilled + 16,
            parked=parked,
            parked_bytes=0 if parked is None else 100 * parked,
            prefilled_tokens=prefilled,
            reused_tokens=reused,
        ),
        activity=Activity(doing="idle", counters={}),
    )


def test_kept_turns_are_summed_over_workers_and_news_of_the_step(driver):
    driver.start("learner")
    for worker, prefilled, reused, parked in (("a", 10, 0, 9), ("a", 5, 50, 4), ("b", 1, 2, 3)):
        driver.reports.record_news(
            worker, news_of(prefilled=prefilled, reused=reused, parked=parked)
        )
    for _ in range(2):
        driver.work(1.0, "idle", "learner")
        driver.close(["learner"])
    first, second = read_lines(driver.folder / "metrics.jsonl")
    assert first["environment/prefilled_tokens"] == 16
    assert first["environment/reused_tokens"] == 52
    assert (first["mem/a/parked_episodes"], first["mem/a/parked_bytes"]) == (4, 400)
    assert first["mem/b/parked_episodes"] == 3
    assert first["throughput/train/slot_occupancy"] == 16 / (32 + 48)
    assert not any(("parked" in n or "reused" in n or "slot" in n) for n in second)


def test_runs_of_one_turn_have_no_numbers_of_kept_turns(driver):
    driver.start("learner")
    driver.reports.record_news("a", news_of(prefilled=8, reused=0, parked=None))
    driver.work(1.0, "idle", "learner")
    driver.close(["learner"])
    line = driver.line("metrics")
    assert line["throughput/train/slot_occupancy"] == 0.25
    assert not any("parked" in name or name.startswith("environment/") for name in line)


def test_what_is_decoded_before_the_first_step_counts_in_its_rate(driver):
    driver.start("rollout-0")
    driver.collect(["rollout-0"])
    driver.work(3.0, "decode", "rollout-0")
    driver.close(["rollout-0"])
    assert "throughput/train/decode_tokens_per_s" not in driver.line("metrics")
    driver.work(1.0, "decode", "rollout-0")
    driver.close(["rollout-0"], **{"rollout/tokens": 200.0})
    assert driver.line("metrics")["throughput/train/decode_tokens_per_s"] == 50.0
