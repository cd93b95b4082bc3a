"""Loses the processes that run environments, as a host that runs out of memory does."""

import contextlib

import psutil

from rollout_worker.environments.environment_pool import CHILD
from tests.services.process.running_processes import running_children


def is_environment(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # of another kind, and gone
        return CHILD in process.cmdline()
    return False


def kill_children():
    """Kills every process of environments that this one has."""
    children = list(filter(is_environment, running_children()))
    assert children
    for child in children:
        child.kill()
