"""Serves a run's folder over real sockets, in this process or as one of its own."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from dashboard import auth
from dashboard.app import build
from dashboard.auth import Tokens
from dashboard.listener import bind, url_of
from dashboard.runs.run_follower import RunFollower
from dashboard.server import DashboardServer
from dashboard.stream import Hub
from tests.deadlines import HANG_S
from tests.deadlines import wait_until as until

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A dashboard that answers."""

    url: str
    tokens: Tokens
    follower: RunFollower | None = None
    server: DashboardServer | None = None
    process: subprocess.Popen | None = None
    output: pathlib.Path | None = None
    """Of the process."""

    @property
    def link(self) -> str:
        return auth.link(self.url, self.tokens)

    def client(self, token: str | None = None) -> httpx.Client:
        """Sends the view token, or another one, with every request."""
        headers = {"authorization": f"Bearer {token or self.tokens.view}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG_S, trust_env=False)

    def get(self, path: str, **parameters: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, params=parameters or None)


@contextlib.contextmanager
def served(
    folder: pathlib.Path,
    *,
    hub: Hub | None = None,
    compared: RunFollower | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Serves in a thread; the block may look at what is served."""
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        follower = RunFollower(folder, hub=hub, **options)
        tokens = Tokens.create()
        app = build(follower, tokens, loopback=True, cookie="made", compared=compared)
        server = DashboardServer(app, follower)
        thread = threading.Thread(target=server.serve_on, args=(listener,), daemon=True)
        thread.start()
        until(lambda: server.started, "the server to start")
        try:
            yield Served(url=url_of(listener), tokens=tokens, follower=follower, server=server)
        finally:
            server.should_exit = True
            thread.join(HANG_S)
            assert not thread.is_alive(), f"the server did not end in {HANG_S} s"


@contextlib.contextmanager
def served_by_process(output: pathlib.Path, *arguments: str) -> Iterator[Served]:
    """`python -m dashboard --port 0 ARGUMENTS`; `output` gets what it says."""
    command = [sys.executable, "-m", "dashboard", "--port", "0", *arguments]
    with output.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ)
    told = re.compile(r"dashboard: (\S+) \(its tokens: (.+)\)")
    try:
        until(
            lambda: told.search(output.read_text()) or process.poll() is not None,
            "the process to say where it is",
        )
        found = told.search(output.read_text())
        assert found, output.read_text()
        url, tokens = auth.read_access(pathlib.Path(found[2]))
        assert url == found[1]
        yield Served(url=url, tokens=tokens, process=process, output=output)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(HANG_S)


def strict(text: str | bytes) -> Any:
    """Parses strict JSON only."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@dataclasses.dataclass(frozen=True)
class Event:
    """One of a stream."""

    id: int
    kind: str
    data: Any


def events(response: httpx.Response) -> Iterator[Event]:
    """Those of an open stream, as they come."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line.startswith(":"):
            continue
        if not line and fields:
            yield Event(int(fields["id"]), fields["event"], strict(fields["data"]))
            fields = {}
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
