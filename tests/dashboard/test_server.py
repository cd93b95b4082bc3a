"""The server around the application: sockets, ends, orphans."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from benchmarks.made_run.made_run import MadeRun, make_run
from benchmarks.made_run.made_steps import RunPlan
from dashboard import auth, listener, server
from dashboard.auth import Tokens
from dashboard.listener import PortTaken, answers, bind, url_of
from dashboard.server import Orphaned
from tests.dashboard.served import ROOT, events, served, until
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow


def test_without_a_port_the_usual_one_is_taken_or_a_free_one(monkeypatch):
    with bind("127.0.0.1", 0) as taken:
        monkeypatch.setattr(listener, "DEFAULT_PORT", taken.getsockname()[1])
        with bind("127.0.0.1", None) as other:
            assert other.getsockname()[1] not in (0, taken.getsockname()[1])


def test_the_usual_port_is_taken_where_it_is_free(monkeypatch):
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(listener, "DEFAULT_PORT", port)
    with bind("127.0.0.1", None) as bound:
        assert bound.getsockname()[1] == port


def test_a_port_that_is_taken_is_named():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_here_is_named(host):
    with pytest.raises(PortTaken, match=f"cannot listen on {host} port"):
        bind(host, None)


@pytest.mark.parametrize("host", ["ü..de", "ü" * 64, "a\0b"])
def test_what_is_no_host_name_is_refused_in_a_sentence(host):
    with pytest.raises(PortTaken, match="is not a host name"):
        bind(host, None)


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.1\r\nX: ", "POST / HTTP/1.1\r\n{}"])
def test_a_request_that_never_arrives_does_not_hold_its_connection(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(server, "REQUEST_S", 0.3)
    make_run(tmp_path / "run", steps=2)
    with served(tmp_path / "run") as site:
        rest = "Host: localhost\r\nContent-Length: 9\r\n\r\n"
        for before in ("", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            if before and not sent:
                continue  # it may stay for a while, as every browser has it
            address = site.url.removeprefix("http://").split(":")
            with socket.create_connection((address[0], int(address[1])), 20) as slow:
                slow.sendall((before + sent.replace("{}", rest)).encode())
                with contextlib.suppress(ConnectionError):
                    while slow.recv(65_536):
                        pass
        assert site.get("/api/run").status_code == 200


def test_connections_beyond_the_most_are_closed_and_those_within_served(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "most_connections", lambda: 4)
    make_run(tmp_path / "run", steps=2)
    with served(tmp_path / "run") as site, contextlib.ExitStack() as stack:
        host, port = site.url.removeprefix("http://").split(":")
        opened = [
            stack.enter_context(socket.create_connection((host, int(port)), 20)) for _ in range(6)
        ]
        for beyond in opened[4:]:
            with contextlib.suppress(ConnectionError):
                assert beyond.recv(1) == b"", "closed"
        for one in opened[:4]:
            one.close()
        until(lambda: not site.server.server_state.connections, "the others to be let go")
        assert site.get("/api/run").status_code == 200


def test_descriptors_are_left_for_the_files_of_the_run():
    limit = server.resource.getrlimit(server.resource.RLIMIT_NOFILE)[0]
    assert 0 < server.most_connections() < limit


def test_a_viewer_may_stay_for_longer_than_a_request_may_take(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_S", 0.3)
    run = MadeRun(tmp_path / "run", RunPlan(steps=50, workers=2))
    run.write_step()
    with (
        served(run.folder) as site,
        site.client() as client,
        client.stream("GET", "/api/stream") as response,
    ):
        told = events(response)
        next(told)
        time.sleep(0.6)
        run.write_step()
        assert next(event for event in told if event.kind == "step")


def test_a_url_is_what_a_browser_takes():
    with bind("127.0.0.1", 0) as four:
        assert url_of(four) == f"http://127.0.0.1:{four.getsockname()[1]}"
        assert answers(url_of(four))
    assert not answers(url := f"http://127.0.0.1:{free_port()}"), url
    if socket.has_ipv6:
        with bind("::1", 0) as six:
            assert url_of(six) == f"http://[::1]:{six.getsockname()[1]}"


def free_port() -> int:
    with bind("127.0.0.1", 0) as free:
        return free.getsockname()[1]


def test_viewers_receive_how_the_run_ended_before_the_server_ends(tmp_path):
    run = MadeRun(tmp_path / "run", RunPlan(steps=50, workers=2))
    run.write_step()
    run.progress()
    heard = []

    def watch() -> None:
        with site.client() as client, client.stream("GET", "/api/stream") as response:
            for event in events(response):
                heard.append(event)

    with served(run.folder) as site:
        thread = threading.Thread(target=watch)
        thread.start()
        until(lambda: len(heard) >= 3, "the viewer to be there")
        run.end("finished")
    thread.join(HANG_S)
    assert not thread.is_alive(), "its stream has ended"
    assert [event for event in heard if event.kind == "run"][-1].data["state"] == "finished"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_the_look_at_the_run_ends_the_server(tmp_path):
    make_run(tmp_path, steps=2)
    with served(tmp_path) as site:
        site.follower.poll = broken
        until(lambda: site.server.should_exit, "the server to end")
    assert isinstance(site.follower.failure, ZeroDivisionError)


def broken() -> None:
    raise ZeroDivisionError


def test_an_orphan_knows_that_it_was_replaced(tmp_path):
    token = tmp_path / "view_token"
    token.write_text("a")
    parent = [os.getpid()]
    orphaned = Orphaned(os.getpid(), token, parent=lambda: parent[0])
    assert not orphaned()
    parent[0] = 1
    assert orphaned() and not orphaned.is_replaced()
    (tmp_path / "new").write_text("b")
    (tmp_path / "new").replace(token)
    assert orphaned.is_replaced()


DRIVER = """
import os, pathlib, subprocess, sys, time
folder, fd = sys.argv[1], int(sys.argv[2])
child = subprocess.Popen(
    [sys.executable, "-m", "dashboard", "--run", folder, "--fd", str(fd),
     "--driver-pid", str(os.getpid())],
    pass_fds=(fd,), start_new_session=True, stdout=subprocess.DEVNULL,
)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def orphan(tmp_path):
    """A run whose driver can be killed: its folder, its dashboard's URL, the two processes."""
    run = MadeRun(tmp_path / "run", RunPlan(steps=50, workers=2))
    run.write_step()
    run.progress()
    with bind("127.0.0.1", 0) as listening:
        tokens, fd = Tokens.create(), listening.fileno()
        auth.write_access(run.folder / auth.FOLDER, url_of(listening), tokens)
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(run.folder), str(fd)],
            pass_fds=(fd,),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        url = url_of(listening)
    run.progress(pid=driver.pid)
    yield run.folder, url, tokens, driver, child
    driver.kill()
    driver.wait()
    if is_there(child):
        os.kill(child, signal.SIGKILL)


def is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_driver_is_shown_as_lost_and_leaves_no_dashboard_behind(orphan):
    folder, url, tokens, driver, child = orphan
    headers = {"authorization": f"Bearer {tokens.view}"}
    with httpx.Client(base_url=url, headers=headers, timeout=HANG_S, trust_env=False) as client:
        until(lambda: answers(url), "the dashboard")
        with client.stream("GET", "/api/stream") as response:
            told = events(response)
            assert next(told).data["state"] == "running"
            driver.kill()
            driver.wait()
            run = next(e for e in told if e.kind == "run" and e.data["state"] == "lost")
            assert run.data["live"] is False
        assert client.get("/api/step/0").status_code == 200, "it goes on for a while"
        (folder / auth.FOLDER / "view_token").write_text("another driver's")
        until(lambda: not is_there(child), "the dashboard to give way")


def test_an_orphan_ends_by_itself_after_its_time():
    assert server.ORPHAN_S == 60
