"""What `deploy/run_local.py` makes of the output of its job."""

import subprocess
import sys
import tempfile

import pytest

from deploy import run_local

LINE = (
    "dashboard: http://127.0.0.1:8470 (link with its token: python -m dashboard --run {} --link)\n"
)


@pytest.fixture
def line(tmp_path):
    folder = tmp_path / "a run"
    (folder / "dashboard").mkdir(parents=True)
    (folder / "dashboard" / "view_token").write_text("secret-token")
    return LINE.format(folder)


def test_a_terminal_gets_the_whole_link(line, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_local.whole_link(line) == "dashboard: http://127.0.0.1:8470/?token=secret-token\n"


def test_a_file_or_a_pipe_gets_no_token(line, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert run_local.whole_link(line) == line


def test_a_run_that_is_over_and_other_lines_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for line in (LINE.format(tmp_path), "step 1\n", "dashboard: none\n"):
        assert run_local.whole_link(line) == line


TRACEBACK = "Traceback (most recent call last):\n  File ...\nRuntimeError(\n"


@pytest.mark.parametrize(
    "said, shown, refusal",
    [
        ("step 1\n", "step 1\n", ""),
        (TRACEBACK + "no such entrypoint\n", TRACEBACK + "no such entrypoint\n", ""),
        (TRACEBACK + run_local.NO_AGENT + "\n", "", run_local.NO_AGENT),
        ("step 1\n" + TRACEBACK, "step 1\n" + TRACEBACK, ""),
    ],
    ids=["a job", "refused for good", "too early", "a job that fails"],
)
def test_a_head_that_is_not_ready_is_no_traceback(capfd, said, shown, refusal):
    command = [sys.executable, "-c", f"print({said!r}, end='')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        relay = run_local.Relay(job.stdout)
        relay.run()
    assert capfd.readouterr().out == shown and relay.refusal == refusal


@pytest.fixture
def long_folder(tmp_path):
    folder = tmp_path / ("d" * 60)
    folder.mkdir()
    return str(folder)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_head_has_a_folder_short_enough_for_its_sockets_N25(long_folder, monkeypatch, variable):
    monkeypatch.setenv(variable, long_folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = run_local.head_folder()
    folder.rmdir()
    assert len(str(folder)) <= run_local.LONGEST_FOLDER


def test_without_a_short_folder_one_message_names_the_variables(long_folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", long_folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(run_local.os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit, match=f"{long_folder} .*TMPDIR, RAY_TMPDIR"):
        run_local.head_folder()


def test_a_head_runs_its_processes_at_ordinary_priority(monkeypatch):
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    assert run_local.head_environment()["RAY_worker_niceness"] == "0"
    monkeypatch.setenv("RAY_worker_niceness", "3")
    assert run_local.head_environment()["RAY_worker_niceness"] == "3"


def test_all_that_a_head_starts_has_a_short_tmpdir(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(run_local.subprocess, "Popen", lambda command, env, **_: given.update(env))
    run_local.start_head({"TMPDIR": "/" + "d" * 80}, str(tmp_path), None)
    assert given["TMPDIR"] == str(tmp_path.parent)
    assert given["TPU_LOG_DIR"] == str(tmp_path / "tpu_logs")
