"""What a run's status file and its processes say of it together."""

import os
import socket
import subprocess
import sys

import pytest

from services.process.run_processes import state_of_run

HERE = {"state": "running", "host": socket.gethostname()}


@pytest.fixture
def ended_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_running_run_is_lost_only_if_its_driver_is_gone_from_this_host(tmp_path, ended_pid):
    assert state_of_run(tmp_path, HERE | {"pid": os.getpid()}) == "running"
    assert state_of_run(tmp_path, HERE | {"pid": ended_pid}) == "lost"
    assert state_of_run(tmp_path, HERE | {"pid": ended_pid, "host": "elsewhere"}) == "running"
    assert state_of_run(tmp_path, HERE | {"pid": ended_pid, "state": "failed"}) == "failed"
    assert state_of_run(tmp_path, {}) == "running"


def test_a_later_process_with_the_driver_s_pid_is_another_one(tmp_path):
    (tmp_path / "stacks").mkdir()
    record = '{"name": "driver", "pid": %d, "host": "%s", "started": 1, "logs": []}\n'
    path = tmp_path / "stacks" / "driver.txt"
    path.write_text(record % (os.getpid(), socket.gethostname()))
    assert state_of_run(tmp_path, HERE | {"pid": os.getpid()}) == "lost"
