"""A process and all that it has started, whatever those do to get away: `setsid`, double forks.

Linux gives a process whose parent has died to its next ancestor that has asked for such orphans, so
below one that asks the tree stays whole. Other systems have no such request, and there only the
process group of a child is ended.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
END_S = 5.0
"""How long to go on killing what starts new processes faster than it is killed."""
_PAUSE_S = 0.005


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose own parent dies (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Asks the kernel for a signal when the thread that started this process ends (Linux only).

    On other systems the end of stdin ends it, once the running scorer has returned.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if sys.platform.startswith("linux") and os.getppid() != parent_pid:
        os._exit(1)  # it died before the call above


def end_descendants(pid: int) -> None:
    """Kills everything below a process, and not the process itself."""
    deadline = time.monotonic() + END_S
    while (alive := _descendants(pid)) and time.monotonic() < deadline:
        end_processes(alive)
        time.sleep(_PAUSE_S)


def end_processes(processes: Iterable[psutil.Process]) -> None:
    """Kills processes, but for those that are gone already or belong to another user."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def orphans_with(variable: str, value: str) -> list[psutil.Process]:
    """The children of this process whose environment has a variable of that value."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def has_ending_child() -> bool:
    """Whether a child of this process has given back its memory, and its own children not yet.

    Its environment cannot be read any more, and its descriptors may be closed already.
    """
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and not process.memory_info().rss:
                return True
    return False


def end_orphans_with(variable: str, value: str, timeout_s: float) -> None:
    """Kills the children of this process whose environment has a variable of that value, and those
    that come when their parents end.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if strays := orphans_with(variable, value):
            end_processes(strays)
            psutil.wait_procs(strays, timeout_s)
        elif has_ending_child():
            time.sleep(_PAUSE_S)
        else:
            return


def reap_session(session: int) -> None:
    """Collects the children of this process that have ended in a session: nobody else would."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if ended and os.getsid(process.pid) == session:
                os.waitpid(process.pid, os.WNOHANG)


def _descendants(pid: int) -> list[psutil.Process]:
    alive = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
    return alive


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
