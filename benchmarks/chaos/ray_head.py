"""A Ray head that outlives the drivers that join it, on loopback and with a token of its own."""

import contextlib
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping

import psutil

from deploy.run_local import (
    end_group,
    free_ports,
    head_environment,
    head_folder,
    start_head,
    wait_for_head,
)

CPUS = 8
"""CPUs that the head reports: enough for an old learner beside the one that replaces it."""


class Head:
    """A running Ray head, and the environment that a driver needs to join it."""

    def __init__(self, process: subprocess.Popen, environment: Mapping[str, str]):
        self.environment = dict(environment)
        """Of a driver that joins it."""
        self._process = process

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of actors of this class, oldest first."""
        found = []
        for process in self._descendants():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(f"ray::{name}"):
                    found.append((process.create_time(), process.pid, process))
        return [process for _, _, process in sorted(found)]

    def _descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []


@contextlib.contextmanager
def running_head(folder: pathlib.Path, extra: dict[str, str]) -> Iterator[Head]:
    """Starts a head, and ends it with all that it started.

    Args:
        folder: its log goes there.
        extra: environment of the head, its actors and the drivers.
    """
    session = head_folder()
    (port,) = free_ports(1)
    environment = head_environment() | extra
    log_path = folder / "head.log"
    with log_path.open("w") as log:
        process, address = start_head(
            environment, str(session), log, "--num-cpus", str(CPUS), port=port
        )
        try:
            wait_for_head(process, address, log_path)
            yield Head(process, {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"})
        finally:
            end_group(process, 20)
            _keep_logs(session, folder)


def _keep_logs(session: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the logs of the actors to `folder`, and removes the session."""
    logs = (session / "session_latest").resolve() / "logs"
    if logs.is_dir():
        target = folder / "ray-logs"
        target.mkdir(exist_ok=True)
        for path in [*logs.glob("worker-*.out"), *logs.glob("worker-*.err"), logs / "raylet.out"]:
            if path.exists() and path.stat().st_size:
                shutil.copy(path, target / path.name)
    shutil.rmtree(session, ignore_errors=True)
