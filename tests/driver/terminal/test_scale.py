"""`python -m driver.scale` against a real control service, with a driver's loop of few lines."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from driver.fleet.control_server import ControlBox, Drain, new_target, offer_control
from driver.reports.status import ExitCode, StatusFile
from driver.terminal.scale import check_running, main, waited_for
from rollout_worker.config.rollout_config import WorkersConfig
from services.control.messages import NotNow, OutOfBounds, WorkerState, WorkerStatus
from services.wire.tls import RunAuthority


def worker(index, state, **changes):
    return WorkerStatus(name=f"rollout-{index}", state=WorkerState(state), **changes)


class Driver:
    """Grants wishes; what becomes of them is up to each test, by `move`."""

    def __init__(self, workers: WorkersConfig):
        self.box = ControlBox(workers)
        self.move = lambda fleet: fleet
        names = range(workers.at_start)
        self.box.show_fleet(
            dataclasses.replace(
                self.box.fleet(),
                step=4,
                policy_version=4,
                workers=tuple(
                    worker(i, "ready", policy_version=4, pid=100 + i, host="h1") for i in names
                ),
            )
        )
        self.ended = threading.Event()
        self.granted = []

    def loop(self):
        while not self.ended.wait(0.02):
            fleet = self.box.fleet()
            for request in self.box.take_requests():
                try:
                    fleet = dataclasses.replace(fleet, target=new_target(request.wish, fleet))
                except (OutOfBounds, NotNow) as error:
                    request.refuse(error)
                    continue
                self.granted.append(request.wish)
                request.accept(fleet.target, fleet.current)
                self.box.show_fleet(fleet)
            self.box.show_fleet(self.move(fleet))


@pytest.fixture
def start(tmp_path):
    """Runs a driver's loop and its control service until the test ends."""
    with contextlib.ExitStack() as stack:

        def start_driver(**workers) -> Driver:
            StatusFile(tmp_path, run="demo", run_id="demo-1")
            driver = Driver(WorkersConfig(**workers))
            authority = RunAuthority.create("demo-1")
            stack.enter_context(
                offer_control(
                    tmp_path,
                    authority,
                    driver.box,
                    bind_host="127.0.0.1",
                    driver_host="127.0.0.1",
                )
            )
            thread = threading.Thread(target=driver.loop, daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(driver.ended.set)
            return driver

        yield start_driver


def scale(tmp_path, *arguments):
    return main(["--run", str(tmp_path), *arguments])


def adding(fleet):
    """A worker that is missing starts; one that starts is ready at the next look."""
    workers = [
        dataclasses.replace(one, state=WorkerState.READY)
        if one.state is WorkerState.STARTING
        else one
        for one in fleet.workers
    ]
    if len(workers) < fleet.target:
        workers.append(worker(len(workers), "starting"))
    return dataclasses.replace(fleet, workers=tuple(workers))


def test_without_an_action_the_fleet_is_a_table(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    driver.move = lambda fleet: dataclasses.replace(
        fleet,
        workers=(fleet.workers[0], dataclasses.replace(fleet.workers[1], last_error="E: gone")),
        notice="no room for rollout-2",
    )
    while not driver.box.fleet().notice:
        driver.ended.wait(0.01)
    assert scale(tmp_path) == 0
    text = capsys.readouterr().out
    assert "step 4, policy version 4: workers ready: 2 of 2 (1 to 8, fixed)" in text
    for part in ("rollout-0", "rollout-1", "ready", "101 on h1", "rollout-1 failed last: E: gone"):
        assert part in text
    assert text.endswith("no room for rollout-2\n")


def test_it_waits_until_added_workers_take_leases(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    driver.move = adding
    assert scale(tmp_path, "--rollout-workers", "4", "--wait", "30") == 0
    text = capsys.readouterr().out
    assert "accepted: rollout workers wanted 4, ready 2" in text
    assert "workers ready: 4 of 4" in text
    assert driver.box.fleet().current == 4


def test_a_drained_worker_is_waited_for_by_name(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    looks = []

    def draining(fleet):
        if not driver.granted:
            return fleet
        looks.append(fleet)
        state = "draining" if len(looks) < 50 else "gone"
        return dataclasses.replace(fleet, workers=(fleet.workers[0], worker(1, state)))

    driver.move = draining
    assert scale(tmp_path, "--drain", "rollout-1", "--wait", "30") == 0
    assert driver.granted == [Drain(name="rollout-1")]
    text = capsys.readouterr().out
    assert "waiting: rollout-1 is draining" in text and "gone" in text


def test_without_waiting_it_returns_once_the_run_has_accepted(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    assert scale(tmp_path, "--rollout-workers", "3", "--wait", "0") == 0
    assert driver.box.fleet().target == 3
    assert "wanted 3" in capsys.readouterr().out


def test_what_was_not_reached_in_time_is_named(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    driver.move = lambda fleet: dataclasses.replace(
        fleet, workers=(*fleet.workers[:2], worker(2, "starting"))
    )
    assert scale(tmp_path, "--rollout-workers", "3", "--wait", "0.2") == 1
    assert "workers ready: 2 of 3, rollout-2 is starting" in capsys.readouterr().err


def test_a_cluster_without_room_is_an_end_of_its_own(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    driver.move = lambda fleet: dataclasses.replace(
        fleet, target=2, notice="the cluster has no room for rollout-2: CPU: asked 8, free 1"
    )
    assert scale(tmp_path, "--rollout-workers", "3", "--wait", "30") == ExitCode.RESOURCES_NOT_MET
    assert "CPU: asked 8, free 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--rollout-workers", "9"], "9 rollout workers are not between rollout.workers.min=2"),
        (["--rollout-workers", "1"], "min=2 and max=8"),
        (["--drain", "rollout-5"], "there is no rollout worker 'rollout-5'"),
        (["--drain", "rollout-0"], "1 rollout workers would be left"),
    ],
)
def test_what_the_run_does_not_allow_is_refused_with_its_bounds(
    tmp_path, start, capsys, arguments, part
):
    driver = start(min=2, max=8)
    assert scale(tmp_path, *arguments) == ExitCode.BAD_CONFIG
    assert part in capsys.readouterr().err
    assert driver.granted == []


@pytest.mark.parametrize("value", ["-1", "1.5", "x", "99999999999"])
def test_what_is_no_number_of_workers_is_an_error_of_usage(tmp_path, capsys, value):
    with pytest.raises(SystemExit) as ended:
        scale(tmp_path, f"--rollout-workers={value}")
    assert ended.value.code == 2
    assert "is not a number of workers" in capsys.readouterr().err


def status_of(folder, **changes):
    path = StatusFile(folder, run="demo", run_id="demo-1").path
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def gone_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert scale(tmp_path / "nowhere") == ExitCode.BAD_CONFIG
    assert "nowhere is not there: give the output folder of a run" in capsys.readouterr().err
    assert scale(tmp_path) == ExitCode.BAD_CONFIG
    assert "holds no status.json" in capsys.readouterr().err
    (tmp_path / "status.json").write_text("[1]")
    assert scale(tmp_path) == ExitCode.BAD_CONFIG
    assert "cannot be read as the status of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"state": "finished", "step": 60}, "run demo is over: it finished after step 60"),
        ({"state": "failed", "reason": "no space"}, "it failed after step 0: no space"),
        ({"state": "interrupted"}, "it was interrupted"),
        ({"pid": "gone"}, "ended without a final status; go on with --resume"),
        ({}, "is still starting, or is ending"),
        ({"host": "elsewhere", "pid": "gone"}, "is still starting, or is ending"),
    ],
)
def test_a_run_that_cannot_be_controlled_says_why(tmp_path, capsys, changes, part):
    if changes.get("pid") == "gone":
        changes = changes | {"pid": gone_pid()}
    status_of(tmp_path, **changes)
    assert scale(tmp_path, "--rollout-workers", "2") == ExitCode.FAILED
    assert part in capsys.readouterr().err


def test_a_run_that_ends_during_the_wait_is_reported(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    status = StatusFile(tmp_path, run="demo", run_id="demo-1")

    def ending(fleet):
        if driver.granted:
            status.end(ExitCode.TERMINATED, "interrupted by SIGTERM")
        return fleet

    driver.move = ending
    assert scale(tmp_path, "--rollout-workers", "3", "--wait", "0.5") == 1
    assert "run demo is over: it was interrupted after step 0" in capsys.readouterr().err


def test_a_run_that_ends_says_so_to_those_who_come(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=2)
    driver.box.close("the run is ending")
    assert scale(tmp_path, "--rollout-workers", "3") == 1
    assert "error: the run is ending" in capsys.readouterr().err


def test_this_process_is_a_run_that_goes_on(tmp_path):
    status_of(tmp_path, host=socket.gethostname(), pid=os.getpid())
    check_running(tmp_path)


def test_a_fleet_is_not_there_while_a_worker_comes_or_goes():
    fleet = ControlBox(WorkersConfig(min=1, max=4)).fleet()
    for states, expected in (
        (["ready"], ""),
        (["working", "gone"], ""),
        (["ready", "draining"], "workers ready: 1 of 1, rollout-1 is draining"),
        (["starting"], "workers ready: 0 of 1, rollout-0 is starting"),
        ([], "workers ready: 0 of 1"),
    ):
        workers = tuple(worker(i, state) for i, state in enumerate(states))
        assert waited_for(dataclasses.replace(fleet, workers=workers), None) == expected
    assert waited_for(dataclasses.replace(fleet, workers=()), "rollout-0") == ""


def test_the_table_shows_memory_as_far_as_it_is_known(tmp_path, start, capsys):
    driver = start(min=1, max=8, start=3)
    held = [
        {},
        {"host_bytes": 1_540_000_000},
        {"host_bytes": 2 * 10**9, "device_bytes": 30 * 10**9},
    ]
    workers = tuple(worker(i, "ready", **memory) for i, memory in enumerate(held))
    driver.move = lambda fleet: dataclasses.replace(fleet, workers=workers)
    driver.box.show_fleet(driver.move(driver.box.fleet()))
    assert scale(tmp_path) == 0
    printed = capsys.readouterr().out
    for index, expected in enumerate(("-", "1.5 GB", "2.0 + 30.0 GB")):
        (row,) = [line for line in printed.splitlines() if line.split()[:1] == [f"rollout-{index}"]]
        assert re.search(rf" {re.escape(expected)} +0 ", row), row
