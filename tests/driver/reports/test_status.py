import errno
import json
import signal

import pytest

from driver.config.load_config import ConfigError
from driver.errors import NothingTrained, RunError
from driver.reports.status import ExitCode, State, StatusFile, exit_code_of
from driver.signals import Interrupted


def read(status):
    return json.loads(status.path.read_text())


def test_running_status_names_process_and_step(tmp_path):
    status = StatusFile(tmp_path / "new", run="demo", run_id="r1")
    status.progress(3, last_checkpoint=2)
    status.progress(4)
    document = read(status)
    assert document["state"] == "running"
    assert document["exit_code"] is None and document["ended"] is None
    assert (document["step"], document["last_checkpoint"]) == (4, 2)
    assert document["pid"] > 0 and document["run"] == "demo" and document["run_id"] == "r1"


class Refused(RunError):
    exit_code = 3


@pytest.mark.parametrize(
    "error, state, code",
    [
        (ConfigError("run.steps: 0 must be at least 1"), "failed", 2),
        (Refused("asked 64 CPU, free 2"), "failed", 3),
        (NothingTrained("nothing was trained"), "failed", 4),
        (KeyboardInterrupt(), "interrupted", 130),
        (Interrupted(signal.SIGTERM), "interrupted", 143),
        (ZeroDivisionError("division by zero"), "failed", 1),
        (SystemExit(1), "failed", 1),
    ],
)
def test_every_way_out_is_written_and_travels_on(tmp_path, error, state, code):
    status = StatusFile(tmp_path, run="demo", run_id="r1")
    with pytest.raises(type(error)), status.tracked():
        raise error
    document = read(status)
    assert (document["state"], document["exit_code"]) == (state, code)
    assert document["reason"] and "\n" not in document["reason"]
    assert document["ended"] >= document["started"]


def test_the_block_that_ends_well_is_finished(tmp_path):
    status = StatusFile(tmp_path, run="demo", run_id="r1")
    with status.tracked():
        status.progress(7, last_checkpoint=7)
    assert (read(status)["state"], read(status)["exit_code"]) == ("finished", 0)
    assert read(status)["step"] == 7


def test_first_ending_stands(tmp_path):
    status = StatusFile(tmp_path, run="demo", run_id="r1")
    status.end(ExitCode.TERMINATED, "interrupted by SIGTERM")
    status.end(ExitCode.FINISHED)
    assert status.current.state is State.INTERRUPTED
    assert read(status)["exit_code"] == 143


def test_a_replaced_file_is_whole_and_leaves_no_temporary_behind(tmp_path):
    status = StatusFile(tmp_path, run="demo", run_id="r1")
    with status.path.open() as before:
        status.progress(1)
        assert json.load(before)["step"] == 0  # the reader keeps the document it opened
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_exception_without_a_code_is_a_failure():
    assert exit_code_of(ValueError("x")) is ExitCode.FAILED


def test_a_full_disk_at_the_end_does_not_hide_the_reason(tmp_path, monkeypatch, capsys):
    status = StatusFile(tmp_path, run="demo", run_id="r1")

    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StatusFile, "_write", full)
    with pytest.raises(ZeroDivisionError), status.tracked():
        raise ZeroDivisionError("the reason")
    assert "status.json: No space left on device" in capsys.readouterr().err
