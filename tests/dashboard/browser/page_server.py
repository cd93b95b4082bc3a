"""A dashboard's server as a process of its own, over a real socket."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

from playwright.sync_api import Page

from dashboard import auth
from dashboard.listener import bind, url_of
from tests.chromium import wait_until_drawn
from tests.deadlines import HANG_S

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = ("-m", "dashboard")


class Served:
    """`python -m dashboard` as a person starts it; `stop` ends it.

    Args:
        arguments: of the command, without a port: it takes a free one.
    """

    def __init__(self, *arguments: str):
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-served-")
        self.log = pathlib.Path(self._folder.name) / "log"
        command = [sys.executable, *PROGRAM, *arguments, "--port", "0"]
        self.process = _start(command, self.log)
        said = self._wait_for_line()
        self.url, self.tokens = auth.read_access(pathlib.Path(said[1]))

    def open(self, page: Page, view: str = "") -> None:
        """Opens the page with its link, and waits until the view is drawn."""
        page.goto(auth.link(self.url, self.tokens) + (f"#{view}" if view else ""))
        wait_until_drawn(page)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def _wait_for_line(self) -> re.Match[str]:
        deadline = time.monotonic() + HANG_S
        while not (said := re.search(r"its tokens: (.*)\)", self.log.read_text())):
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"no address in {HANG_S} s: {self.log.read_text()}"
            time.sleep(0.02)
        return said


class Handed:
    """The server that a driver starts: on a socket and with tokens that outlive it."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._listener: socket.socket = bind("127.0.0.1", 0)
        self.url, self.tokens = url_of(self._listener), auth.Tokens.create()
        auth.write_access(folder / auth.FOLDER, self.url, self.tokens)
        self.log = folder / "dashboard.log"
        self.process: subprocess.Popen | None = None

    open = Served.open

    def start(self) -> None:
        fd = self._listener.fileno()
        command = [sys.executable, *PROGRAM, "--run", str(self._folder)]
        command += ["--fd", str(fd), "--driver-pid", str(os.getpid())]
        self.process = _start(command, self.log, pass_fds=(fd,))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None

    def end(self) -> None:
        """As a driver does when its run has ended: nobody listens any more."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(HANG_S)
        self._listener.close()

    def close(self) -> None:
        self.kill()
        self._listener.close()


def _start(command: list[str], log: pathlib.Path, pass_fds=()) -> subprocess.Popen:
    with log.open("a") as output:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, pass_fds=pass_fds
        )
