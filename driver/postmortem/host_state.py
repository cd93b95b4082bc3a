"""The state of this host when a run has ended badly: memory, disks, processes, the kernel's log.

Control groups and kernel functions are Linux's; elsewhere their values are 0 or empty.
"""

import dataclasses
import pathlib
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

import psutil

from driver.reports.code_record import git_output, package_versions
from services.process.run_processes import RunProcess, state_of

_KERNEL = re.compile(
    r"out of memory|oom[-_ ]kill|killed process|segfault|general protection|i/o error|nvrm|xid",
    re.I,
)
KERNEL_LINES = 200
COMMAND_S = 3.0
"""Bound on a command that is asked, such as dmesg."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """One file system that the run writes to; bytes."""

    path: str
    total: int
    free: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The host as it stands; bytes and Unix seconds."""

    host: str
    cpus: int
    load: float
    """Mean of runnable processes over the last minute."""
    boot_time: float
    memory_total: int
    """The smaller of the host's and the container's."""
    memory_available: int
    oom_kills: int
    """Processes of this container that the kernel killed for memory, since it was made."""
    disks: tuple[Disk, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessState:
    """A process of the run as the kernel sees it."""

    name: str
    pid: int
    state: str
    """As `state_of` says: '' is gone."""
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    threads: int = 0
    open_files: int = 0
    waits_in: tuple[str, ...] = ()
    """Kernel functions that its threads sleep in, with how many do."""


def read_machine(disks: Sequence[pathlib.Path]) -> Machine:
    """Reads memory, load and the file systems of these paths."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used, kills = _container()
    if 0 < limit < total:
        total, available = limit, min(available, max(0, limit - used))
    return Machine(
        host=socket.gethostname(),
        cpus=psutil.cpu_count() or 0,
        load=psutil.getloadavg()[0],
        boot_time=psutil.boot_time(),
        memory_total=total,
        memory_available=available,
        oom_kills=kills,
        disks=tuple(_disk(path) for path in disks if path.exists()),
    )


def read_process(process: RunProcess) -> ProcessState:
    """What the system knows of a process; only its state where it is gone or on another host."""
    state = state_of(process)
    if state in ("", "?"):
        return ProcessState(name=process.name, pid=process.pid, state=state)
    there, folder = psutil.Process(process.pid), pathlib.Path(f"/proc/{process.pid}")
    waits = Counter(_text(task / "wchan").strip() for task in (folder / "task").iterdir())
    return ProcessState(
        name=process.name,
        pid=process.pid,
        state=state,
        rss_bytes=there.memory_info().rss,
        peak_rss_bytes=_numbers(folder / "status").get("VmHWM:", 0) * 1024,
        threads=there.num_threads(),
        open_files=there.num_fds(),
        waits_in=tuple(
            f"{count} x {name}" for name, count in waits.items() if name not in ("", "0")
        ),
    )


def kernel_log_lines(since: float, boot_time: float) -> list[str]:
    """What the kernel noted of memory, faults and devices after a Unix time.

    Raises:
        OSError: if this process may not read the kernel's log.
    """
    asked = subprocess.run(["dmesg"], capture_output=True, timeout=COMMAND_S, errors="replace")
    if asked.returncode:
        raise OSError(f"dmesg: {' '.join(asked.stderr.split())}")
    found = []
    for line in asked.stdout.splitlines():
        stamp = re.match(r"\[\s*([\d.]+)\]", line)
        if _KERNEL.search(line) and not (stamp and boot_time + float(stamp[1]) < since):
            found.append(line)
    return found[-KERNEL_LINES:]


def versions() -> dict[str, str]:
    """Python, platform, the commit of this checkout where it is one, and every package."""
    found = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "tandem commit": git_output("describe", "--always", "--dirty", "--abbrev=40") or "unknown",
    }
    return found | package_versions()


def utc(moment: float | None = None) -> str:
    """A Unix time, by default now, such as 2026-03-01T12:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _disk(path: pathlib.Path) -> Disk:
    usage = shutil.disk_usage(path)
    return Disk(path=str(path), total=usage.total, free=usage.free)


def _container() -> tuple[int, int, int]:
    """Memory limit and use of this process's control group, and its kills; 0 where unknown.

    The file names are those of version 2, then of version 1.
    """
    groups = dict(
        line.split(":", 2)[1:] for line in _text(pathlib.Path("/proc/self/cgroup")).splitlines()
    )
    root = pathlib.Path("/sys/fs/cgroup")
    for folder in (root / groups.get("", "/").strip("/"), root):
        limit = _text(folder / "memory.max").strip()
        if limit:
            kills = _numbers(folder / "memory.events").get("oom_kill", 0)
            return _number(limit), _used(folder, "memory.current", "inactive_file"), kills
    for folder in (root / "memory" / groups.get("memory", "/").strip("/"), root / "memory"):
        limit = _text(folder / "memory.limit_in_bytes").strip()
        if limit:
            kills = _numbers(folder / "memory.oom_control").get("oom_kill", 0)
            used = _used(folder, "memory.usage_in_bytes", "total_inactive_file")
            return _number(limit), used, kills
    return 0, 0, 0


def _used(folder: pathlib.Path, file: str, cache: str) -> int:
    """Memory of a control group that cannot be freed by dropping unused file caches."""
    used = _number(_text(folder / file).strip())
    return max(0, used - _numbers(folder / "memory.stat").get(cache, 0))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _numbers(path: pathlib.Path) -> dict[str, int]:
    """Lines such as `MemTotal: 16 kB` by their first word; others are left out."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _text(path: pathlib.Path) -> str:
    """A file of the kernel; empty where this system has none or does not let us read it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
