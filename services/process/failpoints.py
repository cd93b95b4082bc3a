"""Places where a test can have a process die, wait or fail: off unless a folder is installed.

A failpoint is armed by a file of its name in that folder, whose text is the action. The first
process that reaches the point claims the file by renaming it, so that each armed file fires once
among all processes that share the folder:

    kill           SIGKILL to the process itself
    hang           the thread sleeps for ever
    sleep S        the thread sleeps for S seconds
    raise TEXT     FailpointRaised with that text
    enospc         OSError, as of a full disk
    ebusy          OSError, as of a file that another program keeps
    corrupt        one bit of the data at hand is flipped; only where `spoiled` is called
    skip N then A  the first N arrivals, of any process, pass; then A

`python -m deploy.chaos` and the tests of faults arm them; nothing else does. Switched off, a point
costs one comparison.
"""

import errno
import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from services.process.whole_file import write_whole

VARIABLE = "TANDEM_FAILPOINTS"
"""Names the folder in the driver's environment; the driver hands it on to its actors."""

POINTS = {
    "driver.step": "the driver, at the start of a step",
    "learner.update": "the learner, with an update written down, before the optimiser steps",
    "learner.publish": "the learner, before a version becomes visible",
    "learner.copied": "the learner, with a state copied for a checkpoint and nothing written",
    "learner.checkpoint": "the learner, with a checkpoint half written",
    "learner.complete": "the learner, with a checkpoint whole, before it has its name",
    "learner.retention": "the learner, before it removes old checkpoints",
    "weights.serve": "a learner or worker that serves weights, before it sends some bytes",
    "worker.decode": "a rollout worker, between two segments",
    "worker.receive": "a rollout worker, after each piece of a version that it receives",
    "worker.push": "a rollout worker, before a group is pushed",
}
"""Every point, and its place in the code."""

HANG_S = 3600.0
_ACTION = re.compile(
    r"kill|hang|enospc|ebusy|corrupt|sleep \d+(\.\d+)?|raise .+|skip \d+ then (?!skip).+", re.DOTALL
)
_SKIP = re.compile(r"skip (\d+) then (.+)", re.DOTALL)

_folder: pathlib.Path | None = None
"""Of this process; None switches every point off."""


class FailpointRaised(RuntimeError):
    """What `raise TEXT` raises."""


def install(folder: str | os.PathLike | None) -> None:
    """Switches the points of this process on, or off with None.

    Args:
        folder: shared by the processes of the run; it may be empty, and filled later.
    """
    global _folder
    _folder = None if folder is None else pathlib.Path(folder)


def arm(folder: str | os.PathLike, name: str, action: str) -> pathlib.Path:
    """Arms one point, atomically; an action that was armed there before is replaced.

    Args:
        folder: as given to `install`; made if it is missing.
        name: one of POINTS.
        action: as the docstring of the module lists them.

    Returns:
        The file, which is gone as soon as the point has fired.

    Raises:
        ValueError: if there is no such point or no such action.
    """
    if name not in POINTS:
        raise ValueError(f"there is no failpoint {name!r}; there are {', '.join(sorted(POINTS))}")
    _check(action, name)
    path = pathlib.Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, action)
    return path


def fired(folder: str | os.PathLike, name: str) -> list[int]:
    """Ids of the processes in which the point has fired."""
    marks = pathlib.Path(folder).glob(f"{name}.*.fired")
    return sorted(int(mark.name.split(".")[-2]) for mark in marks)


def reach(name: str, path: str | os.PathLike | None = None) -> None:
    """Does what the point is armed with, if it is.

    Args:
        name: one of POINTS.
        path: the file that is being written, if any: named by the error of `enospc` and `ebusy`.

    Raises:
        FailpointRaised: on `raise TEXT`.
        OSError: ENOSPC or EBUSY, on `enospc` and `ebusy`.
        ValueError: if the text of the file is no action.
    """
    if _folder is None:
        return
    action = _claim(_folder, name)
    if action is not None:
        _act(action, name, path)


def spoiled(name: str, data: memoryview) -> memoryview:
    """`reach` with data at hand: returns it, or on `corrupt` a copy with one bit flipped.

    Args:
        name: one of POINTS.
        data: contiguous bytes; not changed.
    """
    if _folder is None:
        return data
    action = _claim(_folder, name)
    if action is None:
        return data
    if action != "corrupt" or not len(data):
        _act(action, name, None)
        return data
    wrong = bytearray(data)
    wrong[len(wrong) // 2] ^= 0x10
    return memoryview(wrong)


def _claim(folder: pathlib.Path, name: str) -> str | None:
    """The action that is due now; None where nothing is armed or an arrival is let pass."""
    claimed = folder / f"{name}.{os.getpid()}-{threading.get_native_id()}.claimed"
    try:
        os.rename(folder / name, claimed)
    except FileNotFoundError:
        return None
    action = claimed.read_text(encoding="utf-8").strip()
    _check(action, name)
    if (skip := _SKIP.fullmatch(action)) and int(skip[1]) > 0:
        write_whole(folder / name, f"skip {int(skip[1]) - 1} then {skip[2]}")
        claimed.unlink()
        return None
    os.rename(claimed, folder / f"{name}.{os.getpid()}.fired")
    return skip[2] if skip else action


def _act(action: str, name: str, path: str | os.PathLike | None) -> None:
    verb, _, rest = action.partition(" ")
    if verb == "sleep":
        time.sleep(float(rest))
    elif verb == "raise":
        raise FailpointRaised(rest)
    elif verb in ("enospc", "ebusy"):
        where = os.fspath(path) if path is not None else None
        number = getattr(errno, verb.upper())
        raise OSError(number, os.strerror(number), where)
    elif verb in _FOR_EVER:
        _FOR_EVER[verb]()
    else:
        raise ValueError(f"the failpoint {name} has no data in hand that {action!r} could change")


def _kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    _hang()  # until the signal has arrived


def _hang() -> NoReturn:
    while True:
        time.sleep(HANG_S)


_FOR_EVER: dict[str, Callable[[], NoReturn]] = {"kill": _kill, "hang": _hang}


def _check(action: str, name: str) -> None:
    skip = _SKIP.fullmatch(action)
    if not _ACTION.fullmatch(action) or (skip and not _ACTION.fullmatch(skip[2])):
        raise ValueError(
            f"the failpoint {name} is armed with {action!r}: an action is kill, hang, sleep S, "
            "raise TEXT, enospc, ebusy, corrupt, or skip N then one of these"
        )
