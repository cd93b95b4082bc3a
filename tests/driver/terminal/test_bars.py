"""Bars, progress and sparklines of the terminal, cell by cell."""

import math

from rich.console import Console

from diagnosis.records.facts import StepFacts
from driver.terminal.bars import WORKERS_SHOWN, bar, progress, sparkline, step_bars


def plain(renderable, width=60, **options):
    console = Console(width=width, no_color=True, **options)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def facts(processes, wall_s=4.0):
    return StepFacts(step=3, time=0.0, wall_s=wall_s, processes=processes, metrics={})


def test_a_bar_has_a_cell_for_each_share_of_the_step():
    phases = {"forward_backward": 1.0, "optimizer": 1.0, "idle": 2.0}
    assert bar(phases, 4.0, 22, coloured=True).plain == "· waiting ·   update  "


def test_cells_are_shared_out_so_that_a_full_bar_is_full():
    thirds = {"prefill": 1.0, "decode": 1.0, "reward": 1.0}
    for width in (10, 11, 12, 13):
        assert len(bar(thirds, 3.0, width, coloured=True).plain) == width
    assert len(bar({"decode": 1.0}, 4.0, 20, coloured=True).plain) == 5


def test_without_colours_cells_are_letters_and_what_is_unexplained_is_hatched():
    text = bar({"decode": 1.0, "idle": 1.0, "unexplained": 1.0}, 3.0, 12, coloured=False)
    assert text.plain == "dddd····▒▒▒▒"


def test_a_process_without_time_has_an_empty_bar():
    assert bar({}, 0.0, 10, coloured=True).plain == ""


def test_every_process_and_the_critical_path_have_a_bar_and_a_share():
    shown = plain(
        step_bars(
            facts(
                {
                    "learner": {"forward_backward": 1.0, "idle": 3.0},
                    "rollout-0": {"decode": 2.0, "idle": 2.0},
                }
            ),
            60,
            coloured=False,
        )
    ).splitlines()
    assert shown[0].startswith("learner") and shown[0].rstrip().endswith("25 % at work")
    assert shown[1].startswith("rollout-0") and shown[1].rstrip().endswith("50 % at work")
    assert shown[2].startswith("critical path") and shown[2].rstrip().endswith("4.00 s")
    assert "▒▒ other" in shown[3] and "dd decode" in shown[3] and "UU update" in shown[3]
    assert max(map(len, shown)) <= 60


def test_of_many_workers_the_busiest_are_shown_and_the_others_summed_up():
    rows = {f"rollout-{i}": {"decode": 0.1 * i, "idle": 4 - 0.1 * i} for i in range(20)}
    shown = plain(
        step_bars(facts({"learner": {"idle": 4.0}, **rows}), 80, coloured=False), width=80
    )
    assert "rollout-19" in shown and "rollout-0 " not in shown
    assert f"and {20 - WORKERS_SHOWN} more" in shown and "0 to 32 % at work" in shown


def test_a_step_whose_phases_claim_too_much_still_fits():
    row = {"forward_backward": 6.0, "checkpoint": 3.0}
    shown = plain(step_bars(facts({"learner": row}), 60, coloured=False))
    assert max(map(len, shown.splitlines())) <= 60
    learner = shown.splitlines()[0]
    assert learner.count("K") == 10  # a third of the cells


def test_progress_shows_the_remaining_time():
    text = progress(10, 40, 90.0, 100).plain
    assert text.startswith("step 10 of 40 ") and text.endswith(" 25 %, about 1 min 30 s left")
    assert text.count("━") == 10 and text.count("─") == 30
    assert progress(40, 40, 0.0, 100).plain.endswith(" 100 %")
    assert progress(7, 0, math.nan, 100).plain == "step 7"


def test_a_sparkline_goes_from_least_to_greatest_and_marks_what_is_not_finite():
    assert sparkline([0.0, 7.0, math.nan, 3.5, math.inf], 10) == "▁█!▅!"
    assert sparkline([1.0, 2.0, 3.0], 2) == "▁█"
    assert sparkline([5.0, 5.0], 10) == "▄▄"
    assert sparkline([math.nan], 10) == "!" and sparkline([], 10) == ""
