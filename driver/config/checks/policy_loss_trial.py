"""Tries out a policy loss of the user before a run starts."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from driver.config.load_config import ConfigError

_POLICY_LOSS_S = 120.0
_MOST_OUTPUT_BYTES = 2**24
"""Of what it prints, and of any file that it writes."""
_BOUNDED = """
import os, resource, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Bounds its own files, then becomes the command: nothing else sets the bound on every system."""


def _run_apart(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs foreign code with a bound on what it writes, and ends what it has started, which need
    not end with it.

    Raises:
        subprocess.TimeoutExpired: if it takes too long.
    """
    # Files, since a pipe stays open as long as anything that it started.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOUNDED, str(_MOST_OUTPUT_BYTES), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        said = output.read().decode("utf-8", "replace")
        return subprocess.CompletedProcess(
            command, code, said, errors.read().decode("utf-8", "replace")
        )


def try_policy_loss(name: str) -> None:
    """Tries out a user's policy loss in a process of its own: it is foreign code, and JAX would
    take the devices of this host.

    Raises:
        ConfigError: with what is wrong with it.
    """
    command = [sys.executable, "-m", "learner.objective.own_policy_loss", name]
    try:
        tried = _run_apart(command, timeout_s=_POLICY_LOSS_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"algorithm.policy_loss={name}: it took over {_POLICY_LOSS_S:g} s for 30 tokens: "
            "correct the function"
        ) from None
    said = max(len(tried.stdout), len(tried.stderr))
    if tried.returncode and said >= _MOST_OUTPUT_BYTES:
        raise ConfigError(
            f"algorithm.policy_loss={name}: it prints without end, over "
            f"{_MOST_OUTPUT_BYTES:,} bytes for 30 tokens: correct the function"
        )
    # It may end the process with any code, 0 too.
    if tried.returncode or f"{name} can be used" not in tried.stdout.splitlines():
        _, found, problem = tried.stderr.rpartition(f"algorithm.policy_loss={name}: ")
        if not found:  # it ended the process
            lines = tried.stderr.strip().splitlines() if tried.returncode else []
            ended = f"it ended with {tried.returncode}: correct the function"
            problem = lines[-1] if lines else ended
        raise ConfigError(f"algorithm.policy_loss={name}: {problem.strip()}")
