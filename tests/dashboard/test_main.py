"""`python -m dashboard` as a process: what it serves, says and refuses."""

import os
import pathlib
import pty
import re
import signal
import subprocess
import sys

import httpx
import pytest

from benchmarks.made_run.made_run import make_run
from dashboard import auth
from dashboard.__main__ import CannotServe, check_run, main
from dashboard.auth import Tokens
from dashboard.listener import bind, url_of
from tests.dashboard.served import ROOT, served_by_process, strict, until
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, steps=12, seed=1)
    return folder


def test_a_finished_run_is_replayed_and_no_token_is_said_to_what_may_be_a_log(run, tmp_path):
    with served_by_process(tmp_path / "out", "--run", str(run)) as site:
        assert site.get("/").status_code == 200
        until(lambda: site.get("/api/run").json()["step"] == 12, "the log to be read")
        found = site.get("/api/run").json()
        assert (found["state"], found["live"], found["compare"]) == ("finished", False, False)
        with httpx.Client(trust_env=False) as browser:
            assert browser.get(site.link).status_code == 303
        command = pathlib.Path(f"/proc/{site.process.pid}/cmdline").read_bytes().decode()
        place = pathlib.Path(re.search(r"its tokens: (.+)\)", site.output.read_text())[1])
        assert place.is_dir() and place.stat().st_mode & 0o777 == 0o700
        site.process.send_signal(signal.SIGTERM)
        assert site.process.wait(HANG_S) == 0
    assert not place.exists(), "its tokens are gone with it"
    said = site.output.read_text()
    for token in (site.tokens.view, site.tokens.control):
        assert token not in said + command
    assert len(said.splitlines()) == 1, said
    assert not (run / "dashboard").exists(), "a replay leaves nothing in the run's folder"


def test_two_runs_are_compared(run, tmp_path):
    make_run(tmp_path / "other", steps=12, seed=2)
    folders = (str(run), str(tmp_path / "other"))
    with served_by_process(tmp_path / "out", "--compare", *folders) as site:
        document = strict(site.get("/api/compare").content)
        assert [one["folder"] for one in document["runs"]] == list(folders)
        assert len(document["histories"]) == 2
        assert site.get("/api/run").json()["compare"] is True


def test_a_terminal_gets_the_whole_link(run):
    here, there = pty.openpty()
    command = [sys.executable, "-m", "dashboard", "--run", str(run), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=there, stderr=there)
    os.close(there)
    try:
        text = ""
        while "control token: " not in text:
            text += os.read(here, 4096).decode()
        link = re.search(r"dashboard: (http://127\.0\.0\.1:\d+/\?token=[\w-]+)", text)
        with httpx.Client(trust_env=False) as browser:
            assert browser.get(link[1]).status_code == 303
    finally:
        process.terminate()
        process.wait(HANG_S)
        os.close(here)


def test_a_host_that_is_not_loopback_is_warned_of(run, tmp_path):
    with served_by_process(tmp_path / "out", "--run", str(run), "--host", "0.0.0.0"):
        said = (tmp_path / "out").read_text()
    assert "warning: the dashboard listens on 0.0.0.0" in said and "ssh -L" in said


def refused(capsys, *arguments: str) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and "Traceback" not in said.err
    return said.err


def test_a_folder_that_cannot_be_served_is_refused_in_a_sentence(tmp_path, capsys):
    assert "nowhere does not exist" in refused(capsys, "--run", str(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    assert "file is a file" in refused(capsys, "--run", str(tmp_path / "file"))
    assert "it has no status.json" in refused(capsys, "--run", str(tmp_path))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop does not exist" in refused(capsys, "--run", str(tmp_path / "loop"))
    assert "File name too long" in refused(capsys, "--run", str(tmp_path / ("x" * 300)))
    (tmp_path / "status.json").mkdir()
    assert "status.json cannot be read" in refused(capsys, "--run", str(tmp_path))


def test_a_port_that_is_taken_is_refused_in_a_sentence(run, capsys):
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refused(capsys, "--run", str(run), "--port", port)


def test_the_folder_of_another_user_is_refused_in_a_sentence(run, monkeypatch):
    def closed(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(pathlib.Path, "open", closed)  # root may read everything
    with pytest.raises(CannotServe, match="belongs to another user"):
        check_run(run)


def test_the_link_of_a_run_is_shown_with_its_control_token(run, tmp_path, capsys):
    make_run(tmp_path / "run", steps=1)
    assert "no driver serves a dashboard" in refused(
        capsys, "--run", str(tmp_path / "run"), "--link"
    )
    tokens = Tokens.create()
    with bind("127.0.0.1", 0) as listening:
        url = url_of(listening)
        auth.write_access(tmp_path / "run" / "dashboard", url, tokens)
        assert main(["--run", str(tmp_path / "run"), "--link"]) == 0
        said = capsys.readouterr()
        assert said.out == f"{url}/?token={tokens.view}\ncontrol token: {tokens.control}\n"
        assert said.err == ""
    assert main(["--run", str(tmp_path / "run"), "--link"]) == 0
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--run", "a", "--compare", "b", "c"], ["--port", "x"]])
def test_arguments_that_cannot_be_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "usage:" in capsys.readouterr().err
