"""Loses the processes that run environments, as a host that runs out of memory does."""

import psutil

from rollout_worker.environments.environment_pool import CHILD


def kill_children():
    """Kills every process of environments that this one has."""
    children = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and CHILD in child.cmdline()
    ]
    assert children
    for child in children:
        child.kill()
