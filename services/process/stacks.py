"""The stacks of a run's processes, on request from outside.

Every process registers once, at its start. It then writes the Python stacks of all its threads when
it is asked, and at a fatal signal such as SIGSEGV those of its last moment.

`<run>/stacks/<name>-<pid>.txt` is the file of one process. Its first line is a JSON object that
names the process and the files of its output; `run_processes.py` reads it.

A request is a file beside it, `<name>-<pid>.ask`. A thread of the process removes it and answers,
holding the interpreter lock. Where none comes to that, native code holds the lock: then whoever
asked removes the file and sends SIGUSR1, which `faulthandler` answers in C and without the lock.
The signal is not the first way, since it reads the frames of threads that may be running: in a busy
process it can read freed memory, which ends the process (cpython issue 116008).
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import io
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection

from services.process.run_processes import (
    FOLDER,
    RunProcess,
    read_processes,
    state_and_start,
    state_of,
)

SIGNAL = signal.SIGUSR1
POLL_S = 0.02
ASKED_POLL_S = 0.1
"""How often a process looks whether it is asked."""
EVIDENCE_BYTES = 2**16
"""Most that a process sends of its stacks and of each of its logs."""
ANSWERED = b"=== answered ==="
"""Line after stacks that a process's own thread wrote: they are whole then."""
KEPT = 64
"""Files of processes that are gone and never dumped anything; older ones are removed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackAnswer:
    """The outcome of one request."""

    process: RunProcess
    problem: str
    """Why there are no new stacks in the process's file; empty where there are."""


class _Registration:
    """The open file of this process: the signal handler writes to its descriptor."""

    file: io.TextIOWrapper | None = None


def register(run_folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """Makes this process answer; a second call replaces the first.

    Args:
        run_folder: of the run, on a disk that this host may share or not.
        name: of the process in this run, such as `learner` or `rollout-3`.

    Returns:
        The file of this process, or None where the folder is not on this host or cannot be written
        to: then stacks go to stderr, which Ray keeps in a log.
    """
    path = run_folder / FOLDER / f"{name}-{os.getpid()}.txt"
    record = {
        "name": name,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": state_and_start(os.getpid())[1],
        "logs": _outputs(),
    }
    try:
        if not run_folder.is_dir():
            raise FileNotFoundError(f"{run_folder} is not on this host")
        path.parent.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        file = os.fdopen(os.open(path, flags, 0o644), "w", encoding="utf-8")
        file.write(json.dumps(record) + "\n")
        file.flush()
        _remove_old(path.parent)
    except OSError as error:
        print(f"stacks of {name} go to stderr: {error}", file=sys.stderr, flush=True)
        _answer_into(2)
        return None
    _answer_into(file.fileno())
    previous, _Registration.file = _Registration.file, file
    if previous is not None:
        previous.close()
    threading.Thread(
        target=_answer_requests, args=(file, _request_of(path)), name="stacks", daemon=True
    ).start()
    return path


def own_evidence() -> dict[str, str]:
    """The stacks of this process's threads and the last lines of its output, by file name: for a
    post-mortem on a host that cannot read them.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        found = {"stacks.txt": file.read()[-EVIDENCE_BYTES:]}
    for path in map(pathlib.Path, _outputs()):
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - EVIDENCE_BYTES))
            found[path.name] = log.read().decode(errors="replace")
    return found


def request_stacks(
    run_folder: pathlib.Path, timeout_s: float, pids: Collection[int] | None = None
) -> list[StackAnswer]:
    """Asks the run's processes on this host for their stacks, and waits for them.

    A process is asked only if it is the one that registered and has a handler in place: SIGUSR1
    would end any other.

    Args:
        run_folder: of the run.
        timeout_s: for all of them together.
        pids: of the processes to ask; None asks all that have registered.
    """
    began = time.monotonic()
    answers, asked = [], {}
    for process in read_processes(run_folder):
        if pids is not None and process.pid not in pids:
            continue
        try:
            problem = _why_not(process)
            if not problem:
                asked[process] = _ask(process)
                continue
        except OSError as error:
            problem = f"could not be asked: {error}"
        answers.append(StackAnswer(process=process, problem=problem))
    signalled = {
        process
        for process, size in asked.items()
        if not _is_answered(process.path, size, began + timeout_s / 2) and _signal(process)
    }
    for process, size in asked.items():
        is_rest = process in signalled
        answered = _is_answered(process.path, size, began + timeout_s, rest_is_end=is_rest)
        problem = f"no answer within {timeout_s:g} s, state {state_of(process) or 'gone'}"
        answers.append(StackAnswer(process=process, problem="" if answered else problem))
    return answers


def _why_not(process: RunProcess) -> str:
    """Why a process must not or cannot be asked; empty where it can."""
    if process.host != socket.gethostname():
        return f"is on {process.host}"
    if state_of(process) == "":
        return "is gone"
    try:
        lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return "is gone, or this system has no /proc"
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    if not int(caught, 16) >> (SIGNAL - 1) & 1:
        return f"has no handler for {SIGNAL.name}"
    return ""


def _ask(process: RunProcess) -> int:
    """Notes the time in the file and asks; returns the size before the answer."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    with process.path.open("a", encoding="utf-8") as file:
        file.write(f"\n=== asked at {now} ===\n")
    size = process.path.stat().st_size
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    os.close(os.open(_request_of(process.path), flags, 0o644))
    return size


def _signal(process: RunProcess) -> bool:
    """Takes the request back and sends the signal instead, unless the process has just taken it.

    A stopped process gets none: it would find it when it goes on, with its threads running.

    Returns:
        whether it was sent.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        _request_of(process.path).unlink()
        if state_of(process) not in ("", "T"):
            os.kill(process.pid, SIGNAL)
            return True
    return False


def _request_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".ask")


def _answer_requests(file: io.TextIOWrapper, request: pathlib.Path) -> None:
    """Writes stacks whenever the request appears, until another `register` closes the file."""
    while not file.closed:
        time.sleep(ASKED_POLL_S)
        try:
            request.unlink()
            faulthandler.dump_traceback(file, all_threads=True)
            os.write(file.fileno(), ANSWERED + b"\n")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            print(f"stacks were not written: {error}", file=sys.stderr, flush=True)


def _is_answered(
    path: pathlib.Path, size: int, deadline: float, *, rest_is_end: bool = False
) -> bool:
    """Waits until stacks stand behind the first `size` bytes of a file.

    Args:
        rest_is_end: whether they are whole when the file rests, as those for a signal.

    Returns:
        whether there are any by the deadline.
    """
    last = 0
    while True:
        written = path.read_bytes()[size:]
        if ANSWERED in written or (rest_is_end and 0 < len(written) == last):
            return True
        if time.monotonic() > deadline:
            return bool(written) and rest_is_end
        last = len(written)
        time.sleep(POLL_S)


def _answer_into(fd: int) -> None:
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(SIGNAL, fd, all_threads=True)


def _outputs() -> list[str]:
    """The files behind stdout and stderr: Ray gives each worker its own."""
    found = []
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.isfile(target) and target not in found:
                found.append(target)
    return found


def _remove_old(folder: pathlib.Path) -> None:
    """Removes old files, so that a long run does not keep one for every worker it has started."""
    silent = [
        process
        for process in read_processes(folder.parent)
        if state_of(process) == "" and process.path.read_bytes().count(b"\n") <= 1
    ]
    for process in silent[KEPT:]:
        process.path.unlink(missing_ok=True)
