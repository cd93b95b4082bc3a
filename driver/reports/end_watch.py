"""Writes the end of a run whose driver could not: it was killed outright, or Ray ended it.

A small process of its own waits for the driver to end, whatever ends it, and looks at status.json.
Where that still says that this driver runs, it writes state, exit code and reason. It knows nothing
of Ray, ends with the driver, and is nobody's child: a job that is stopped has all its descendants
killed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from driver.reports.status import ExitCode, State
from services.process.run_processes import state_and_start
from services.process.whole_file import write_whole
from services.wire.secret_text import without_secrets

POLL_S = 0.5
"""Where the system does not report the end of a process that is no child."""
REASON = (
    "the driver ended without a word: it was killed outright (SIGKILL, as for want of memory), or "
    "Ray ended it; --resume goes on from the last checkpoint and what was recorded since"
)


def start_end_watch(folder: pathlib.Path) -> None:
    """Starts the process for the run of this one; Ctrl-C does not reach it.

    Does nothing on a system without /proc, which does not say when a process ended.

    Args:
        folder: of the run, with its status.json.
    """
    pid = os.getpid()
    started = state_and_start(pid)[1]
    if not started:
        return
    command = [sys.executable, "-m", "driver.reports.end_watch", "--run", str(folder)]
    first = subprocess.Popen(
        [*command, "--pid", str(pid), "--started", str(started)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=pathlib.Path(__file__).resolve().parents[2],
        env=without_secrets(os.environ),
        start_new_session=True,
    )
    # It ends at once and leaves the watch behind; what has ended is collected.
    threading.Thread(target=first.wait, name="end-watch", daemon=True).start()


def wait_for_end(pid: int, started: int) -> None:
    """Returns once a process has ended.

    Args:
        started: clock ticks since boot, as `state_and_start` gives them.
    """
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.pidfd_open(pid)
        try:
            if state_and_start(pid)[1] == started:
                select.select([descriptor], [], [])
            return
        finally:
            os.close(descriptor)
    while True:
        state, start = state_and_start(pid)
        if state in "ZX" or start != started:
            return
        time.sleep(POLL_S)


def write_end(folder: pathlib.Path, pid: int, ended: float) -> bool:
    """Writes how the run ended, if its driver has not; returns whether it did.

    Args:
        folder: of the run.
        pid: of the driver that has ended.
        ended: Unix time.
    """
    path = folder / "status.json"
    try:
        status: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the folder is gone, or holds something else now
        return False
    if status.get("state") != State.RUNNING.value or status.get("pid") != pid:
        return False  # it wrote its end itself, or another driver goes on with the run
    end = {
        "state": State.FAILED.value,
        "exit_code": int(ExitCode.KILLED),
        "reason": REASON,
        "ended": ended,
    }
    write_whole(path, json.dumps(status | end, indent=1), sync=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Waits for the driver; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m driver.reports.end_watch", description=__doc__)
    parser.add_argument("--run", required=True, type=pathlib.Path)
    parser.add_argument("--pid", required=True, type=int)
    parser.add_argument("--started", required=True, type=int)
    given = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)
    wait_for_end(given.pid, given.started)
    write_end(given.run, given.pid, time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main())
