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
    Accuracy,
    RunSummary,
    StepView,
    machine_line,
    plain_line,
    step_row,
    summary_lines,
)

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
    return ledger.close_step(3, PROCESSES, wall_s=8.5, leases=LeaseTable(seed=0, prompt_count=4))


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


def test_accuracy_is_shown_where_it_is_known(record):
    row = step_row({**METRICS, "eval/accuracy/strict": 0.86}, record, 60)
    assert row.cells()[2] == "0.860"


def test_absent_and_bad_numbers_still_make_a_row(record):
    assert step_row({"reward/total/mean": float("nan")}, record, 60).cells()[1] == "nan"
    assert step_row({}, record, 60).cells()[1:5] == ("-", "-", "-", "-")


def test_without_a_terminal_each_step_is_one_line_under_a_repeated_header(record):
    out = io.StringIO()
    row = step_row(METRICS, record, 60)
    with StepView("demo", Console(file=out, force_terminal=False)) as view:
        for _ in range(HEADER_EVERY + 1):
            view.add_step(row)
    lines = out.getvalue().splitlines()
    assert len(lines) == HEADER_EVERY + 3
    assert lines[0] == lines[HEADER_EVERY + 1] == plain_line(COLUMNS)
    assert lines[1] == plain_line(row.cells()) and len(lines[1]) == len(lines[0])
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_one_table_that_keeps_the_last_steps(record):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, height=60)
    with StepView("demo", console) as view:
        for _ in range(25):
            view.add_step(step_row(METRICS, record, 60))
    assert "the first 5 steps are in metrics.jsonl" in out.getvalue()


def test_steps_that_are_no_longer_shown_are_not_kept(record):
    with StepView("demo", Console(file=io.StringIO(), force_terminal=False)) as view:
        first = step_row(METRICS, record, 60)
        kept = weakref.ref(first)
        view.add_step(first)
        del first
        for _ in range(LIVE_ROWS):
            assert kept() is not None
            view.add_step(step_row(METRICS, record, 60))
        assert kept() is None


def test_a_terminal_shows_bars_of_the_last_step_and_the_time_left(record):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, height=60, color_system=None)
    with StepView("demo", console) as view:
        view.add_step(step_row(METRICS, record, 60))
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
    with StepView("demo", console) as view:
        view.add_step(step_row({}, evaluated, 60))
        for one in (start, record, record):
            view.add_step(step_row(METRICS, one, 60))
    assert out.getvalue().rstrip().split("step 3 of 60")[-1].count("about 8 min 4 s left") == 1


def test_a_low_terminal_gives_up_rows_of_the_table_for_the_bars(record):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150, height=24, color_system=None)
    with StepView("demo", console) as view:
        for _ in range(15):
            view.add_step(step_row(METRICS, record, 60))
    last = out.getvalue()[out.getvalue().rindex("demo") :]
    assert "the first 5 steps are in metrics.jsonl" in last and "critical path" in last


def test_where_the_sides_overlap_the_row_shows_the_longer_one_and_what_it_waited_for(tmp_path):
    ledger = StepLedger(tmp_path, unexplained_fraction=1.0, warn=pytest.fail)
    processes = {
        "learner": {"forward_backward": 3.0, "queue_wait": 1.0},
        "rollout-0": {"decode": 3.5, "idle": 0.5},
    }
    record = ledger.close_step(3, processes, wall_s=4.0, leases=LeaseTable(seed=0, prompt_count=4))
    row = step_row(METRICS, record, 60)
    assert (row.phase_s["decode"], row.phase_s["update"], row.phase_s["other"]) == (3.5, 0.5, 0.0)


def test_text_of_a_run_is_never_read_as_markup():
    out = io.StringIO()
    StepView("demo", Console(file=out)).say("a [bold] prompt [/nonsense] " + "x" * 200)
    assert out.getvalue() == "a [bold] prompt [/nonsense] " + "x" * 200 + "\n"


def summary(**changes):
    values = {
        "name": "demo",
        "rewards": [0.30, 0.33, 0.35, 0.37, 0.40] + [0.6] * 50 + [0.90, 0.91, 0.92, 0.91, 0.91],
        "accuracy_before": Accuracy(correct=62, total=200),
        "accuracy_after": Accuracy(correct=172, total=200),
        "seconds": 213.6,
        "outputs": {"logs": "runs/demo", "policy": "runs/demo/export"},
    }
    return RunSummary(**(values | changes))


def test_machine_line_is_exact():
    assert machine_line(summary()) == (
        "demo: accuracy 0.31 -> 0.86, reward 0.35 -> 0.91, steps 60, seconds 214"
    )


def test_machine_line_says_what_is_unknown():
    line = machine_line(summary(rewards=[], accuracy_before=None, accuracy_after=None))
    assert line == "demo: accuracy n/a -> n/a, reward n/a -> n/a, steps 0, seconds 214"


def test_summary_has_both_intervals_and_ends_with_the_machine_line():
    lines = summary_lines(summary())
    assert "0.350" in lines[0] and "first 5" in lines[0]
    assert "0.910" in lines[1] and "last 5" in lines[1]
    # Wilson, z = 1.96: (p + z2/2n +- z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n)
    assert "0.310 (62 of 200; 95 % interval 0.250 to 0.377)" in lines[2]
    assert "0.860 (172 of 200; 95 % interval 0.805 to 0.901)" in lines[3]
    assert "logs: runs/demo" in lines and "policy: runs/demo/export" in lines
    assert lines[-1] == machine_line(summary())


def test_a_short_run_is_halved_so_that_no_step_is_on_both_sides():
    lines = summary_lines(summary(rewards=[0.1, 0.2]))
    assert lines[0].startswith("reward of the first 1 steps") and lines[0].endswith("0.100")
    assert lines[1].endswith("0.200")


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="3 right answers of 2"):
        Accuracy(correct=3, total=2)
