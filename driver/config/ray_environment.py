"""The environment of a Ray cluster of our own; it must be set before Ray is imported."""

import os
import pathlib
import secrets
from collections.abc import Mapping, MutableMapping

from driver.errors import RunError

LONGEST_FOLDER = 36
"""Bytes of the path of Ray's folder: Ray adds up to 71 for its sockets, and 107 are allowed."""
ON_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""Has Ray take 127.0.0.1 for the address of this host, on Linux too: its processes listen there
alone, and not on every address, some of them without a token."""
NO_IDLE_WORKERS = ("RAY_prestart_worker_first_driver", "0")
"""Else Ray starts a Python process for each CPU at once, none of which an actor of ours uses: these
have an environment of their own."""
SHORT = "/tmp"
TPU_LOGS = pathlib.Path("/tmp/tpu_logs")
"""Where libtpu writes unless it is told otherwise: the logs of every program on this host."""


class PathTooLong(RunError):
    """Ray cannot make its sockets in the folder for temporary files."""

    exit_code = 2


def joins_cluster(environ: Mapping[str, str]) -> bool:
    """Whether the environment names a cluster: RAY_ADDRESS, which a submitted job has too."""
    return bool(environ.get("RAY_ADDRESS"))


def set_environment(environ: MutableMapping[str, str], run_folder: pathlib.Path) -> None:
    """Prepares the cluster that this process will start: what the user has set stays, and a cluster
    that is joined has its own rules. Ray reads the variables when it is imported or started.

    It gets a random token, sockets on loopback only, processes of ordinary priority, a folder short
    enough for its sockets, and no logs of other programs' libtpu to show.

    Args:
        run_folder: of the run; exists.

    Raises:
        PathTooLong: naming the variable to set.
    """
    if joins_cluster(environ):
        return
    if "RAY_AUTH_MODE" not in environ:
        environ["RAY_AUTH_MODE"] = "token"
        environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    environ.setdefault(*ON_LOOPBACK)
    # Ray's own default is 15: the learner would yield to everything else on the machine.
    environ.setdefault("RAY_worker_niceness", "0")
    environ.setdefault(*NO_IDLE_WORKERS)
    _shorten(environ)
    if "TPU_LOG_DIR" not in environ and TPU_LOGS.is_dir():
        own = run_folder / TPU_LOGS.name
        own.mkdir(exist_ok=True)
        environ["TPU_LOG_DIR"] = str(own)


def _shorten(environ: MutableMapping[str, str]) -> None:
    """Has Ray use /tmp where TMPDIR is too long for it."""
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in environ else "TMPDIR"
    folder = os.path.join(environ.get(name, SHORT), "ray")
    if len(os.fsencode(folder)) <= LONGEST_FOLDER:
        return
    if name == "RAY_TMPDIR" or not os.access(SHORT, os.W_OK | os.X_OK):
        raise PathTooLong(
            f"{name}={environ[name]} is too long for Ray, whose sockets lie below it: set "
            f"RAY_TMPDIR to a folder of at most {LONGEST_FOLDER - len('/ray')} bytes; TMPDIR may "
            "stay as it is"
        )
    environ["RAY_TMPDIR"] = SHORT
