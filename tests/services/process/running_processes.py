"""Processes that a test has started, seen while any of them may end."""

import contextlib

import psutil


def is_running(process: psutil.Process) -> bool:
    """Whether it has not ended, whether or not somebody has collected it since."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running_children(pid: int | None = None) -> set[psutil.Process]:
    """Those of a process, and theirs, that run.

    Args:
        pid: of the process; None is this one. Without it there are none.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(filter(is_running, psutil.Process(pid).children(recursive=True)))
    return set()
