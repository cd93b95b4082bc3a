"""The dashboard's process from the driver's side: it starts, comes again, and is in no way."""

import contextlib
import io
import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tarfile
import time

import httpx
import psutil
import pytest

from dashboard import auth
from dashboard.listener import answers, bind
from driver.config.paths import FolderTaken, check_folder
from driver.config.sections.log import DashboardConfig
from driver.postmortem.archive import collect
from driver.postmortem.evidence import Sources
from driver.reports import dashboard_process as dashboard
from driver.reports.dashboard_process import DashboardPortTaken, open_dashboard
from driver.reports.redact import is_secret
from driver.reports.status import ExitCode, StatusFile
from tests.deadlines import HANG_S
from tests.services.process.running_processes import is_running

pytestmark = pytest.mark.slow

FREE = DashboardConfig(port=0)


def until(condition, what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {HANG_S} s for {what}"
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def status(folder):
    return StatusFile(folder, run="made", run_id="made-1")


def served(folder: pathlib.Path) -> psutil.Process | None:
    """The process that answers, once it does."""
    url, _ = auth.read_access(folder / "dashboard")
    try:
        httpx.get(f"{url}/healthz", timeout=1, trust_env=False).raise_for_status()
    except httpx.HTTPError:
        return None
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # of another kind, and gone
            if "dashboard" in child.cmdline():
                return child
    return None


def client(folder: pathlib.Path) -> httpx.Client:
    url, tokens = auth.read_access(folder / "dashboard")
    headers = {"authorization": f"Bearer {tokens.view}"}
    return httpx.Client(base_url=url, headers=headers, timeout=HANG_S, trust_env=False)


def test_it_serves_the_run_and_is_gone_with_it(folder, status):
    said = []
    with open_dashboard(FREE, folder) as board:
        assert stat.S_IMODE((folder / "dashboard").stat().st_mode) == 0o700
        board.start(said.append)
        until(lambda: served(folder), "the dashboard")
        process = served(folder)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(
            19, os.getpriority(os.PRIO_PROCESS, 0) + dashboard.NICENESS
        )
        with client(folder) as viewer:
            assert viewer.get("/api/run").json()["run_id"] == "made-1"
        url, tokens = auth.read_access(folder / "dashboard")
        assert said == [
            f"dashboard: {url} (link with its token: python -m dashboard --run {folder} --link)"
        ]
        log = (folder / "dashboard.log").read_text()
        for token in (tokens.view, tokens.control):
            assert token not in " ".join(process.cmdline()) + log
            assert token not in "".join(process.environ().values())
    assert not is_running(process)
    assert not answers(url) and not (folder / "dashboard").exists()
    assert not list(folder.glob(".dashboard-*"))


def test_it_gets_the_drivers_environment_without_the_secrets(folder, status, monkeypatch):
    secret = {
        "WANDB_API_KEY": "0123456789abcdef",
        "RAY_AUTH_TOKEN": "0123456789abcdef",
        "MY_PASSWORD": "a",
        "DATABASE": "postgres://me:pass@db.example/runs",
        "MIRROR": "hf_0123456789AbCdEfGhIj",
    }
    needed = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "VIRTUAL_ENV": sys.prefix,
        "LC_ALL": "C.UTF-8",
        "no_proxy": "localhost",
        "http_proxy": "http://127.0.0.1:1",
        "MY_OWN": "token",
    }
    for name, value in (secret | needed).items():
        monkeypatch.setenv(name, value)
    with open_dashboard(FREE, folder) as board:
        board.start(lambda text: None)
        until(lambda: served(folder), "the dashboard")
        environ = served(folder).environ()
    assert not set(secret) & set(environ)
    assert {name: environ.get(name) for name in needed} == needed
    assert environ["PATH"] == os.environ["PATH"] and environ.get("HOME") == os.environ.get("HOME")


def test_viewers_receive_the_end_of_the_run(folder, status):
    received = []
    with open_dashboard(FREE, folder) as board:
        board.start(lambda text: None)
        until(lambda: served(folder), "the dashboard")
        viewer = client(folder)
        with viewer.stream("GET", "/api/stream") as response:
            lines = response.iter_lines()
            next(line for line in lines if line.startswith("data: "))
            status.end(ExitCode.FAILED, "the disk is full")
            board.stop()
            received = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        viewer.close()
    states = [one.get("state") for one in map(json.loads, received) if "reason" in one]
    assert states[-1] == "failed"


def test_a_dashboard_that_ends_is_started_again_at_the_same_place_a_few_times(
    folder, status, monkeypatch
):
    monkeypatch.setattr(dashboard, "RESTARTS", 2)
    monkeypatch.setattr(dashboard, "RESTART_PAUSE_S", 0.01)
    said = []
    with open_dashboard(FREE, folder) as board:
        board.start(said.append)
        for restart in range(3):
            until(lambda: served(folder), f"start {restart}")
            served(folder).kill()
            until(lambda n=restart + 2: len(said) == n, "the driver to notice")
        auth.read_access(folder / "dashboard")
    assert [text.split(": ")[-1] for text in said[1:]] == [
        "starting it again, 2 restarts left",
        "starting it again, 1 restarts left",
        "it is not started again",
    ]
    assert all("exit code -9" in text and "dashboard.log" in text for text in said[1:])


def test_a_dashboard_that_hangs_does_not_keep_the_run_from_its_end(folder, status, monkeypatch):
    monkeypatch.setattr(dashboard, "END_S", 1.0)
    with open_dashboard(FREE, folder) as board:
        board.start(lambda text: None)
        until(lambda: served(folder), "the dashboard")
        process = served(folder)
        os.kill(process.pid, signal.SIGSTOP)
    assert not is_running(process)


def test_a_program_that_cannot_be_started_is_one_line(folder, status, monkeypatch):
    monkeypatch.setattr(dashboard.sys, "executable", "/nowhere/python")
    said = []
    with open_dashboard(FREE, folder) as board:
        board.start(said.append)
        until(lambda: len(said) == 2, "the driver to notice")
    assert any("no dashboard: " in text and "the run goes on" in text for text in said)


def test_a_port_that_is_taken_ends_the_start(folder, monkeypatch):
    monkeypatch.setattr(dashboard, "TAKE_OVER_S", 0.2)
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(DashboardPortTaken, match=rf"log.dashboard.port={port}.*null for a free"),
            open_dashboard(DashboardConfig(port=port), folder),
        ):
            raise AssertionError("was opened")
    assert DashboardPortTaken.exit_code == ExitCode.BAD_CONFIG
    assert list(folder.iterdir()) == [], "nothing is left"


def test_a_host_that_is_not_this_ones_ends_the_start(folder):
    with (
        pytest.raises(DashboardPortTaken, match="log.dashboard.host=192.0.2.1"),
        open_dashboard(DashboardConfig(host="192.0.2.1"), folder),
    ):
        raise AssertionError("was opened")


def test_another_host_than_loopback_is_warned_of(folder, status):
    said = []
    with open_dashboard(DashboardConfig(host="0.0.0.0", port=0), folder) as board:
        board.start(said.append)
    assert "is not on loopback" in said[0] and "unencrypted" in said[0]


def test_without_one_nothing_is_made(folder):
    with open_dashboard(DashboardConfig(enabled=False), folder) as board:
        assert board is None
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_no_reason_not_to_run(folder, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(auth, "write_access", full)
    with open_dashboard(FREE, folder) as board:
        assert board is None
    assert "no dashboard: " in capsys.readouterr().err


def left_behind(folder: pathlib.Path, tokens: auth.Tokens, port: int = 1) -> int:
    """What a killed driver leaves; returns the file that its dashboard watches, as an inode."""
    auth.write_access(folder / "dashboard", f"http://127.0.0.1:{port}", tokens)
    return os.stat(folder / "dashboard" / "view_token").st_ino


def test_what_a_killed_driver_left_is_replaced_and_its_links_stay_good(folder):
    tokens = auth.Tokens.create()
    inode = left_behind(folder, tokens)
    (folder / ".dashboard-x").mkdir()
    check_folder(folder, resume=False)  # it is no run
    with open_dashboard(FREE, folder) as board:
        assert auth.read_access(folder / "dashboard") == (board.url, tokens)
        assert os.stat(folder / "dashboard" / "view_token").st_ino != inode
        assert not (folder / ".dashboard-x").exists()
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(FolderTaken):
        check_folder(folder, resume=False)


@pytest.mark.parametrize("fault", ["cut short", "open to others"])
def test_tokens_that_others_may_know_are_not_used_again(folder, fault):
    old = auth.Tokens(view="", control="") if fault == "cut short" else auth.Tokens.create()
    left_behind(folder, old)
    (folder / "dashboard").chmod(0o755 if fault == "open to others" else 0o700)
    with open_dashboard(FREE, folder):
        _, tokens = auth.read_access(folder / "dashboard")
    assert tokens.view != old.view and len(tokens.view) >= auth.TOKEN_BYTES


def test_a_port_that_a_killed_driver_left_and_others_took_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(dashboard, "TAKE_OVER_S", 0.2)
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        left_behind(folder, auth.Tokens.create(), port)
        with open_dashboard(DashboardConfig(), folder) as board:
            assert not board.url.endswith(f":{port}")


KILLED = """
import os, pathlib, signal, sys, time
from driver.config.sections.log import DashboardConfig
from driver.reports.dashboard_process import open_dashboard
from driver.reports.status import StatusFile
folder = pathlib.Path(sys.argv[1])
StatusFile(folder, run="made", run_id="made-1")
with open_dashboard(DashboardConfig(port=0), folder) as board:
    board.start(lambda text: print(text, flush=True))
    time.sleep(600)
"""


def test_an_open_page_goes_on_with_the_driver_that_resumes(folder):
    """Same address, same tokens; the dashboard that was left never calls the new driver gone."""
    killed = subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE)
    with killed:
        assert killed.stdout is not None and killed.stdout.readline()
        url, tokens = auth.read_access(folder / "dashboard")
        with client(folder) as viewer:
            until(lambda: answers(url) and viewer.get("/api/run").is_success, "the dashboard")
            killed.kill()
            killed.wait()
            until(lambda: viewer.get("/api/run").json()["state"] == "lost", "the loss to be shown")
    StatusFile(folder, run="made", run_id="made-1")
    with open_dashboard(DashboardConfig(), folder) as board:
        board.start(lambda text: None)
        assert (board.url, tokens) == (url, auth.read_access(folder / "dashboard")[1])
        until(lambda: served(folder), "the dashboard")
        with client(folder) as viewer:
            shown = viewer.get("/api/run").json()
    assert (shown["state"], shown["pid"]) == ("running", os.getpid())


def test_a_post_mortem_holds_no_token(folder, status):
    with open_dashboard(FREE, folder) as board:
        _, tokens = auth.read_access(folder / "dashboard")
        board.start(lambda text: None)
        until(lambda: served(folder), "the dashboard")
        path = collect(folder, RuntimeError(f"token={tokens.view}"), Sources(), print)
    with tarfile.open(path) as archive:
        held = {entry.name: archive.extractfile(entry).read() for entry in archive}
    listing = next(text for name, text in held.items() if name.endswith("files.txt"))
    assert b"dashboard/view_token" in listing, "its name may stand there"
    for name, text in held.items():
        for token in (tokens.view, tokens.control):
            assert token.encode() not in text, name
    for file in ("url", "view_token", "control_token"):
        assert is_secret(folder / "dashboard" / file)
    assert io.BytesIO(path.read_bytes()).read(2) == b"\x1f\x8b"
