"""How a run ended, for users and for the program that started it: exit codes and `status.json`.

`status.json` in the run's folder is replaced atomically at every change, so a reader sees a whole
document at any moment. Where the driver is killed outright, `end_watch.py` writes the
end; only the loss of its host leaves `state: running` behind, with the process id to check.
"""

import contextlib
import dataclasses
import enum
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from driver.errors import RunError
from services.process.whole_file import write_whole


class ExitCode(enum.IntEnum):
    """What `python -m driver` returns to the shell."""

    FINISHED = 0
    """All steps are done and the last checkpoint is on disk."""
    FAILED = 1
    """An error ended the run; its last complete checkpoint is usable."""
    BAD_CONFIG = 2
    """Nothing was started: configuration, files or geometry cannot work."""
    RESOURCES_NOT_MET = 3
    """Nothing was started: the cluster or machine lacks what the run asks for."""
    NOTHING_TRAINED = 4
    """All steps are done and the last checkpoint is on disk, but no step changed the policy."""
    KILLED = 137
    """The driver was killed outright, or Ray ended it: `end_watch.py` has written so."""
    INTERRUPTED = 130
    """Ctrl-C (SIGINT); a checkpoint was written first."""
    HUNG_UP = 129
    """The terminal was closed (SIGHUP); a checkpoint was written first."""
    TERMINATED = 143
    """SIGTERM, as schedulers send it; a checkpoint was written first."""


class State(enum.Enum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Content of status.json; times in Unix seconds."""

    run: str
    run_id: str
    state: State
    exit_code: int | None
    """None while running."""
    reason: str
    """One line; empty while running or finished."""
    step: int
    """Last step that was closed."""
    last_checkpoint: int | None
    """Step of the newest complete checkpoint."""
    started: float
    ended: float | None
    pid: int
    host: str


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a run that this error ended.

    A RunError names its own; anything else but Ctrl-C is FAILED.
    """
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode(error.exit_code if isinstance(error, RunError) else ExitCode.FAILED)


class StatusFile:
    """Owns status.json of one run.

    `with status.tracked(): ...` writes the final state on every exit, and lets errors propagate.
    """

    def __init__(self, folder: pathlib.Path, *, run: str, run_id: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "status.json"
        self._status = Status(
            run=run,
            run_id=run_id,
            state=State.RUNNING,
            exit_code=None,
            reason="",
            step=0,
            last_checkpoint=None,
            started=time.time(),
            ended=None,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        self._write()

    @property
    def current(self) -> Status:
        """What the file says now."""
        return self._status

    def progress(self, step: int, last_checkpoint: int | None = None) -> None:
        """Notes the last closed step, and the newest checkpoint where it changed."""
        if last_checkpoint is None:
            last_checkpoint = self._status.last_checkpoint
        self._update(step=step, last_checkpoint=last_checkpoint)

    def end(self, code: ExitCode, reason: str = "") -> None:
        """Writes how the run ended; a later call for the same run is ignored.

        On a full disk the error goes to stderr, so that the reason of the end is not hidden.
        """
        if self._status.state is not State.RUNNING:
            return
        states = {
            ExitCode.FINISHED: State.FINISHED,
            ExitCode.INTERRUPTED: State.INTERRUPTED,
            ExitCode.TERMINATED: State.INTERRUPTED,
            ExitCode.HUNG_UP: State.INTERRUPTED,
        }
        try:
            self._update(
                state=states.get(code, State.FAILED),
                exit_code=int(code),
                reason=" ".join(reason.split()),
                ended=time.time(),
            )
        except OSError as error:
            print(f"cannot write {self.path}: {error.strerror}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def tracked(self) -> Iterator["StatusFile"]:
        """Ends the status with the block: finished, or by the error that leaves it."""
        try:
            yield self
        except BaseException as error:
            self.end(exit_code_of(error), _reason(error))
            raise
        self.end(ExitCode.FINISHED)

    def _update(self, **changes: Any) -> None:
        self._status = dataclasses.replace(self._status, **changes)
        self._write()

    def _write(self) -> None:
        document = {**dataclasses.asdict(self._status), "state": self._status.state.value}
        write_whole(self.path, json.dumps(document, indent=1), sync=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by SIGINT"
    text = str(error)
    if isinstance(error, RunError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
