"""The arithmetic of `deploy/dashboard_bench`, worked out by hand, and its clients over sockets."""

import asyncio
import json
import subprocess
import sys

import pytest

from benchmarks.dashboard import demo_run, history, screenshots, step_cost, viewer_process, viewers
from benchmarks.dashboard.browser import ROOT, serving
from benchmarks.dashboard.history import seen_of
from benchmarks.dashboard.step_cost import StepBlock, StepCost, block_order, cost_of
from benchmarks.dashboard.viewers import Memory, growth
from benchmarks.made_run.made_run import make_run
from dashboard.listener import answers
from tests.dashboard.served import served, until

GOOD = {"loads": [(0.1, 0.9, 4e5)], "updates_ms": [3.0]}


def test_which_side_comes_first_turns_from_pair_to_pair():
    assert block_order(3) == [False, True, True, False, False, True]


def test_the_cost_is_the_median_ratio_of_neighbours():
    step_s = {10: 1.0, 11: 3.0, 12: 2.0, 20: 2.2, 30: 5.0, 40: 4.0, 50: 1.0, 60: 1.3}
    blocks = [
        StepBlock(watched=False, first=10, last=12),  # median 2.0
        StepBlock(watched=True, first=20, last=20),
        StepBlock(watched=True, first=30, last=30),
        StepBlock(watched=False, first=40, last=40),
        StepBlock(watched=False, first=50, last=50),
        StepBlock(watched=True, first=60, last=60),
    ]
    found = cost_of(blocks, step_s)
    assert found.ratios == pytest.approx((1.1, 1.25, 1.3))
    assert found.ratio == pytest.approx(1.25) and found.without_s == 2.0


def test_a_drift_of_the_steps_is_no_cost():
    step_s = {step: 1.0 + 0.01 * step for step in range(40)}
    blocks = [
        StepBlock(watched=watched, first=5 * at, last=5 * at + 4)
        for at, watched in enumerate(block_order(4))
    ]
    ratios = cost_of(blocks, step_s).ratios
    assert ratios[0] < 1 < ratios[-1], "it falls on both sides"
    assert cost_of(blocks, step_s).ratio == pytest.approx(1, abs=0.01)


def test_a_block_without_its_neighbour_does_not_count():
    step_s = {0: 1.0, 1: 2.0, 2: 9.0}
    blocks = [StepBlock(watched=bool(at % 2), first=at, last=at) for at in range(3)]
    assert cost_of(blocks, step_s).ratios == (2.0,)


@pytest.mark.parametrize("watched", [[], [True], [True, True]])
def test_what_is_no_pair_is_refused(watched):
    blocks = [StepBlock(watched=one, first=0, last=0) for one in watched]
    with pytest.raises(ValueError, match="pair"):
        cost_of(blocks, {0: 1.0})


def test_the_middle_half_leaves_out_a_quarter_on_either_side():
    assert StepCost(without_s=1, ratios=tuple(range(8))).middle_half == (2, 5)
    assert StepCost(without_s=1, ratios=(1, 2, 3)).middle_half == (1, 3)


class Steps:
    """A run whose steps close one by one while it is waited for."""

    step = 7

    def wait_for_step(self, step: int) -> None:
        self.step = step


def test_the_step_that_goes_on_when_a_block_begins_is_left_out():
    assert step_cost._steps(Steps(), 5) == (9, 13)  # pyright: ignore[reportArgumentType]


def test_memory_grows_by_the_most_of_each_process_beyond_what_it_had():
    during = [Memory(101, 60), Memory(104, 58), Memory(102, 75)]
    assert growth(Memory(100, 50), during) == Memory(4, 25)


def test_of_page_loads_the_median_counts_and_of_updates_the_longest_too():
    seen = seen_of([(1, 5, 30), (2, 4, 20), (9, 3, 10)], [4.0, 1.0, 2.0])
    assert (seen.paint_s, seen.drawn_s, seen.nbytes) == (2, 4, 20)
    assert (seen.update_ms, seen.longest_ms) == (2.0, 4.0)


@pytest.mark.parametrize(
    "changes, within",
    [
        ({}, True),
        ({"loads": [(1.6, 0.9, 4e5)]}, False),
        ({"loads": [(0.1, 1.6, 4e5)]}, False),
        ({"loads": [(0.1, 0.9, 3.1e6)]}, False),
        ({"updates_ms": [3.0, 3.0, 51.0]}, False),
    ],
    ids=["good", "paint", "drawn", "bytes", "one update"],
)
def test_every_goal_of_the_long_run_counts(changes, within):
    assert seen_of(**(GOOD | changes)).is_within is within
    assert (history.MOST_PAINT_S, history.MOST_BYTES, history.MOST_UPDATE_MS) == (1.5, 3e6, 50)
    assert (step_cost.MOST, viewers.MOST_GROWTH_MB) == (1.02, 50)


def test_viewers_listen_and_count_what_they_receive(tmp_path):
    make_run(tmp_path, steps=3)
    with served(tmp_path) as site:
        command = [sys.executable, "-m", "benchmarks.dashboard.viewer_process", site.url, "3", "1"]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdin is not None
            process.stdin.write(site.tokens.view + "\n")
            process.stdin.flush()
            count = viewers.wait_until_listening(process, 3, 20)
            until(lambda: site.follower.hub.viewers == 3, "all of them")
        finally:
            process.kill()
            process.wait()
    assert count["listening"] == 3 and count["dropped"] == 0 and count["failed"] == []


def test_a_viewer_counts_each_event_and_its_own_end(tmp_path):
    make_run(tmp_path, steps=3)
    count = viewer_process.Count()
    with served(tmp_path) as site:
        host, port = site.url.removeprefix("http://").split(":")

        async def watch() -> None:
            view = viewer_process.view(host, int(port), site.tokens.view, count, asleep=False)
            task = asyncio.create_task(view)
            while count.events < 3:
                await asyncio.sleep(0.02)
            site.server.should_exit = True
            await task

        asyncio.run(asyncio.wait_for(watch(), 20))
    assert count.events >= 3 and (count.listening, count.dropped) == (1, 1)


def test_the_step_of_a_run_is_that_of_its_status(tmp_path):
    run = demo_run.DemoRun.__new__(demo_run.DemoRun)
    run.folder = tmp_path
    assert run.step == 0 and run.metrics() == []
    (tmp_path / "status.json").write_text(json.dumps({"step": 4}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    assert run.step == 4 and run.metrics() == [{"step": 3}, {"step": 4}]


def test_a_server_for_a_browser_is_there_with_the_block_and_gone_with_it(tmp_path):
    make_run(tmp_path / "run", steps=3)
    with serving(tmp_path / "log", "--run", str(tmp_path / "run")) as link:
        url, _, token = link.partition("/?token=")
        assert token and answers(url)
    assert not answers(url)


def test_a_server_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(RuntimeError, match="does not exist: give the output folder"),
        serving(tmp_path / "log", "--run", str(tmp_path / "nowhere")),
    ):
        raise AssertionError("it serves")


def test_screenshots_of_a_folder_without_a_run_are_refused(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nope"):
        with pytest.raises(SystemExit) as end:
            screenshots.main(["--run", str(folder)])
        assert end.value.code == 2
        assert f"--run {folder} holds no status.json" in capsys.readouterr().err
