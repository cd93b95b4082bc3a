"""The processes that a run has started, as registered in its folder, and their states.

`stacks.py` registers them. A process is known by its pid and its start: a later process of the same
pid is another one.
"""

import contextlib
import dataclasses
import json
import pathlib
import socket
from collections.abc import Mapping
from typing import Any

import psutil

FOLDER = "stacks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunProcess:
    """A process that has registered, as described in its file."""

    name: str
    pid: int
    host: str
    started: int
    """Clock ticks since the host's boot, to tell a process from a later one of the same pid; 0
    where the system does not report it."""
    logs: tuple[str, ...]
    """Files that its stdout and stderr go to; empty for a terminal or a pipe."""
    path: pathlib.Path
    """Of its stacks."""


def read_processes(run_folder: pathlib.Path) -> list[RunProcess]:
    """Every process that has registered, the newest first.

    A file that is torn is left out, and so is a link, which would lead out of the run's folder.
    """
    found = []
    folder = run_folder / FOLDER
    for path in () if folder.is_symlink() else folder.glob("*.txt"):
        if path.is_symlink():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with path.open(encoding="utf-8", errors="replace") as file:
                record = json.loads(file.readline(65_536))
            process = RunProcess(
                name=str(record["name"]),
                pid=int(record["pid"]),
                host=str(record["host"]),
                started=int(record["started"]),
                logs=tuple(str(log) for log in record["logs"]),
                path=path,
            )
            found.append((path.stat().st_mtime, process))
    return [process for _, process in sorted(found, key=lambda pair: -pair[0])]


def state_of(process: RunProcess) -> str:
    """One letter as in /proc/PID/stat: `R` runs, `S` sleeps, `D` waits for a disk, `T` is stopped.

    Returns:
        '' where the process is gone or a zombie, `?` where it is on another host or the system
        does not report it.
    """
    if process.host != socket.gethostname():
        return "?"
    if not pathlib.Path("/proc/self/stat").exists():
        return "?"
    state, started = state_and_start(process.pid)
    return "" if state in "ZX" or started != process.started else state


def state_of_run(run_folder: pathlib.Path, status: Mapping[str, Any]) -> str:
    """`running`, `finished`, `failed`, `interrupted`, or `lost` where status.json says running and
    its driver is gone; a driver on another host counts as alive.

    Args:
        run_folder: of the run.
        status: content of its status.json.
    """
    state, pid = str(status.get("state", "running")), status.get("pid")
    if state != "running" or not isinstance(pid, int) or status.get("host") != socket.gethostname():
        return state
    for process in read_processes(run_folder):
        if process.pid == pid:
            return "lost" if state_of(process) == "" else state
    return state if psutil.pid_exists(pid) else "lost"


def state_and_start(pid: int) -> tuple[str, int]:
    """State letter and start in clock ticks of a process; ("X", 0) where it is gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    fields = text.rpartition(")")[2].split()  # a name may hold spaces and brackets
    return fields[0], int(fields[19])
