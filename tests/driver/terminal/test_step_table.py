import dataclasses
import io
import weakref

import pytest
from rich.console import Console

from driver.accounting.ledger import LeaseTable, StepLedger
from driver.terminal.step_table import (
    COLUMNS,
    HEADER_EVERY,
    LIVE_ROWS,
    StepView,
    plain_line,
    step_row,
)
from services.trajectories.data_order import DataOrder

METRICS = {
    "reward/total/mean": 0.3512,
    "rollout/completion_len_mean": 42.25,
    "throughput/train/decode_tokens_per_s": 1234.4,
    "time/train/update_s": 2.75,
}
PROCESSES = {
    "learner": {"idle": 5.0, "forward_backward": 2.0, "optimizer": 0.5, "publish": 0.25},
    "rollout-0": {"decode": 3.0, "idle": 5.0},
    "rollout-1": {"weights_wait": 0.25, "wire": 0.25, "prefill": 0.5, "decode": 4.0, "reward": 0.5},
}


@pytest.fixture
def record(tmp_path):
    ledger = StepLedger(tmp_path, unexplained_fraction=1.0, warn=pytest.fail)
    return ledger.close_step(3, PROCESSES, wall_s=8.5, leases=LeaseTable(DataOrder.of_one(0, 4)))


def test_row_shows_the_slowest_worker_and_the_learner(record):
    row = step_row(METRICS, record, 60)
    assert row.phase_s == {
        "weights": 0.5,
        "prefill": 0.5,
        "decode": 4.0,
        "scoring": 0.5,
        "update": 2.5,
        "publish": 0.25,
        "ckpt": 0.0,
        "eval": 0.0,
        "compile": 0.0,
        "other": 0.25,
    }
    assert sum(row.phase_s.values()) == row.step_s == 8.5
    assert row.cells()[:6] == ("3/60", "0.351", "-", "42.2", "1234", "8.50")


@pytest.mark.parametrize(
    "learner, worker",
    [
        ({"forward_backward": 6.0}, {"prefill": 1.0, "decode": 4.0}),
        ({"forward_backward": 2.0, "publish": 1.0}, {"decode": 6.5, "reward": 0.5}),
        ({"forward_backward": 7.5, "checkpoint": 0.5}, {"weights_wait": 2.0, "decode": 5.0}),
    ],
)
def test_columns_of_a_step_whose_sides_overlap_are_not_cut(tmp_path, learner, worker):
    ledger = StepLedger(tmp_path, unexplained_fraction=1.0, warn=lambda text: None)
    processes = {"learner": learner, "rollout-0": worker, "rollout-1": {"decode": 1.0}}
    leases = LeaseTable(DataOrder.of_one(0, 4))
    row = step_row(METRICS, ledger.close_step(3, processes, wall_s=8.0, leases=leases), 60)
    seconds = learner | worker
    columns = {"prefill": "prefill", "decode": "decode", "scoring": "reward"}
    columns |= {"update": "forward_backward", "publish": "publish", "ckpt": "checkpoint"}
    for column, phase in columns.items():
        assert row.phase_s[column] == seconds.get(phase, 0.0)
    assert row.phase_s["weights"] == 0.0, "a wait for the learner is no work"
    assert row.step_s == 8.0 < sum(row.phase_s.values())


def test_accuracy_is_shown_where_it_is_known(record):
    row = step_row({**METRICS, "eval/accuracy/strict": 0.86}, record, 60)
    assert row.cells()[2] == "0.860"


def test_absent_and_bad_numbers_still_make_a_row(record):
    assert step_row({"reward/total/mean": float("nan")}, record, 60).cells()[1] == "nan"
    assert step_row({}, record, 60).cells()[1:5] == ("-", "-", "-", "-")


def test_without_a_terminal_each_step_is_one_line_under_a_repeated_header(record):
    out = io.StringIO()
    row = step_row(METRICS, record, 60)
    with StepView("demo", 60, Console(file=out, force_terminal=False)) as view:
        for _ in range(HEADER_EVERY + 1):
            view.add_step(METRICS, record)
    lines = out.getvalue().splitlines()
    assert len(lines) == HEADER_EVERY + 3
    assert lines[0] == lines[HEADER_EVERY + 1] == plain_line(COLUMNS)
    assert lines[1] == plain_line(row.cells()) and len(lines[1]) == len(lines[0])
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_one_table_that_keeps_the_last_steps(record):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, height=60)
    with StepView("demo", 60, console) as view:
        for _ in range(25):
            view.add_step(METRICS, record)
    assert "the first 5 steps are in metrics.jsonl" in out.getvalue()


class Metrics(dict):
    """A dict that a weak reference may point to."""


def test_steps_that_are_no_longer_shown_are_not_kept(record):
    with StepView("demo", 60, Console(file=io.StringIO(), force_terminal=False)) as view:
        first = Metrics(METRICS)
        kept = weakref.ref(first)
        view.add_step(first, record)
        del first
        for _ in range(LIVE_ROWS):
            assert kept() is not None
            view.add_step(METRICS, record)
        assert kept() is None


def test_a_terminal_shows_bars_of_the_last_step_and_the_time_left(record):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, height=60, color_system=None)
    with StepView("demo", 60, console) as view:
        view.add_step(METRICS, record)
    text = out.getvalue()
    assert "step 3 of 60" in text and "about 8 min 4 s left" in text  # 57 steps of 8.5 s
    for name in ("learner", "rollout-0", "rollout-1", "critical path"):
        assert name in text
    assert (
        " update " in text and "62 % at work" in text
    )  # rollout-1: 5.25 of 8.5 s, its wait left out


def test_the_time_left_is_by_usual_steps_and_not_by_the_start_or_an_evaluation(record):
    compiled = {"learner": {"compile": 80.0}, "rollout-0": {"decode": 3.0}}
    start = dataclasses.replace(record, step=1, wall_s=90.0, processes=compiled)
    evaluated = dataclasses.replace(record, step=0, wall_s=50.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, height=60, color_system=None)
    with StepView("demo", 60, console) as view:
        view.add_step({}, evaluated)
        for one in (start, record, record):
            view.add_step(METRICS, one)
    assert out.getvalue().rstrip().split("step 3 of 60")[-1].count("about 8 min 4 s left") == 1


def test_a_low_terminal_gives_up_rows_of_the_table_for_the_bars(record):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, height=24, color_system=None)
    with StepView("demo", 60, console) as view:
        for _ in range(15):
            view.add_step(METRICS, record)
    last = out.getvalue()[out.getvalue().rindex("demo") :]
    assert "the first 5 steps are in metrics.jsonl" in last and "critical path" in last


def test_text_of_a_run_is_never_read_as_markup():
    out = io.StringIO()
    StepView("demo", 60, Console(file=out)).say("a [bold] prompt [/nonsense] " + "x" * 200)
    assert out.getvalue() == "a [bold] prompt [/nonsense] " + "x" * 200 + "\n"
