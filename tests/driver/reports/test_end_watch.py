"""The end of a run is written down whoever kills its driver."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from driver.reports import end_watch
from driver.reports.end_watch import start_end_watch, write_end
from driver.reports.status import ExitCode, StatusFile
from services.process.run_processes import state_of_run
from tests.deadlines import HANG_S, wait_until
from tests.services.process.running_processes import running_children

ROOT = pathlib.Path(__file__).resolve().parents[3]
DRIVER = """
import os, pathlib, sys, time
from driver.errors import RunError
from driver.reports.end_watch import start_end_watch
from driver.reports.status import StatusFile
folder = pathlib.Path(sys.argv[1])
status = StatusFile(folder, run="demo", run_id="r1")
start_end_watch(folder)
status.progress(7, last_checkpoint=6)
print("runs", flush=True)
with status.tracked():
    line = sys.stdin.readline().strip()
    if line == "exit":
        os._exit(1)
    raise RunError("no room")
"""
"""A driver that ends as it is told: by a signal, as Ray ends it, or with an error of its own."""


def read(folder: pathlib.Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def ended(folder: pathlib.Path, how: str | int) -> dict:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        assert driver.stdout.readline() == "runs\n"
        if how == "stop the job":
            # What a stopped job kills with it.
            wait_until(lambda: not running_children(driver.pid), "the watch to be nobody's child")
            os.killpg(driver.pid, signal.SIGKILL)
        elif isinstance(how, str):
            driver.stdin.write(f"{how}\n")
            driver.stdin.flush()
        else:
            os.killpg(driver.pid, how)
        driver.wait(HANG_S)
        wait_until(lambda: read(folder)["state"] != "running", "the end to be written")
        status = read(folder)
        assert status["pid"] == driver.pid and status["step"] == 7
        return status


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT, "exit", "stop the job"])
def test_a_driver_that_cannot_write_its_end_has_it_written_R10(tmp_path, how):
    status = ended(tmp_path, how)
    assert (status["state"], status["exit_code"]) == ("failed", ExitCode.KILLED)
    assert status["reason"].startswith("the driver ended without a word")
    assert status["ended"] >= status["started"] and status["last_checkpoint"] == 6
    assert state_of_run(tmp_path, status) == "failed"


def test_an_end_that_the_driver_wrote_stays(tmp_path):
    status = ended(tmp_path, "raise")
    assert (status["exit_code"], status["reason"]) == (1, "no room")


def test_a_driver_that_goes_on_with_the_run_is_left_alone(tmp_path):
    StatusFile(tmp_path, run="demo", run_id="r1")
    before = read(tmp_path)
    assert not write_end(tmp_path, os.getpid() + 1, 5.0) and read(tmp_path) == before
    assert write_end(tmp_path, os.getpid(), 5.0) and read(tmp_path)["ended"] == 5.0


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_folder_without_a_status_is_left_alone(tmp_path, text):
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    assert not write_end(tmp_path, 1, 5.0)


def test_a_system_that_does_not_say_when_a_process_started_gets_no_watch(tmp_path, monkeypatch):
    """The watch would take the driver for one that has ended, and write the end of a live run."""
    started = []
    monkeypatch.setattr(end_watch, "state_and_start", lambda pid: ("X", 0))
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **_: started.append(command))
    start_end_watch(tmp_path)
    assert not started
