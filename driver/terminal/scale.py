"""Shows or changes the rollout workers of a run that is going on.

    python -m driver.scale --run DIR [--rollout-workers N | --drain NAME] [--wait SECONDS]

Without an action it prints the workers as a table.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from driver.errors import NoRun, RunError
from driver.reports.status import ExitCode, State
from driver.terminal.harmless import harmless_console
from services.control.access import NoAccess, read_access
from services.control.client import ControlClient, ControlFailed
from services.control.messages import (
    FleetStatus,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    WorkerState,
    WorkerStatus,
)
from services.process.run_processes import state_of_run

T = TypeVar("T")

ANSWER_S = 30.0
"""For the driver to accept a request: it checks for them between two waits."""
POLL_S = 0.5
PLAIN_WIDTH = 120
"""Columns where the output is no terminal."""

_EPILOG = """\
examples:
  python -m driver.scale --run runs/gsm8k                        shows the workers
  python -m driver.scale --run runs/gsm8k --rollout-workers 4    add or drain up to four
  python -m driver.scale --run runs/gsm8k --drain rollout-1      let this one finish and end

exit codes: 0 done, 1 the run does not exist, is over or did not finish the change in time,
2 the request is not allowed, 3 the cluster has no room, 130 interrupted
"""


class NotControllable(RunError):
    """No driver answers for the run; the message says why."""


class Refused(RunError):
    """The run does not allow the request."""

    exit_code = 2


class NoRoom(RunError):
    """The run reduced its target again."""

    exit_code = 3


class NotReached(RunError):
    """The fleet did not reach its target in time."""


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m driver.scale`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.scale",
        description="Shows or changes the rollout workers of a run that is going on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run", required=True, type=pathlib.Path, metavar="DIR", help="output folder of the run"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--rollout-workers", type=_count, metavar="N", help="the number of workers to have"
    )
    action.add_argument(
        "--drain", metavar="NAME", help="worker to end after it finished or returned its work"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait until it is done; 0 returns once the run has accepted "
        "(default: %(default)g)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; a user's mistake is one message without a traceback."""
    given = parser().parse_args(arguments)
    console = harmless_console(plain_width=PLAIN_WIDTH)
    try:
        check_running(given.run)
        with _connect(given.run) as client:
            if given.rollout_workers is None and given.drain is None:
                _show(_ask(client.fleet), console)
            else:
                _change(client, given, console)
        return ExitCode.FINISHED
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "interrupted: requests that the run has accepted stay in force",
            file=sys.stderr,
            flush=True,
        )
        return ExitCode.INTERRUPTED


def _connect(folder: pathlib.Path) -> ControlClient:
    try:
        return ControlClient(*read_access(folder))
    except NoAccess as error:
        raise NotControllable(str(error)) from error


def check_running(folder: pathlib.Path) -> None:
    """Checks that the run in this folder is still going on, by status.json and its process.

    Raises:
        NoRun: if there is none.
        NotControllable: if it is over, or its driver is gone.
    """
    path = folder / "status.json"
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        state, run, host, pid = State(status["state"]), status["run"], status["host"], status["pid"]
    except FileNotFoundError as error:
        missing = "holds no status.json" if folder.is_dir() else "is not there"
        raise NoRun(
            f"{folder} {missing}: give the output folder of a run, as its line 'outputs in ...' "
            "names it"
        ) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise NoRun(f"{path} cannot be read as the status of a run: {error!r}") from error
    if state is not State.RUNNING:
        reason = f": {status['reason']}" if status["reason"] else ""
        raise NotControllable(
            f"run {run} is over: it {_ENDED[state]} after step {status['step']}{reason}"
        )
    if state_of_run(folder, status) == "lost":
        raise NotControllable(
            f"run {run} is over: its driver, process {pid} on {host}, ended without a final "
            "status; go on with --resume"
        )


_ENDED = {
    State.FINISHED: "finished",
    State.FAILED: "failed",
    State.INTERRUPTED: "was interrupted",
}


def fleet_table(fleet: FleetStatus) -> Table:
    """The workers as a table; `-` is what is not known yet."""
    title = (
        f"step {fleet.step}, policy version {fleet.policy_version}: {_ready(fleet)} "
        f"({fleet.least} to {fleet.most}, {fleet.policy.value})"
    )
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for column in ("worker", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("version", "in progress", "done", "tok/s", "memory", "restarts"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("process", overflow="fold")
    for worker in fleet.workers:
        table.add_row(
            worker.name,
            worker.state.value,
            str(worker.policy_version) if worker.policy_version >= 0 else "-",
            str(worker.groups_leased),
            str(worker.groups_done),
            f"{worker.tokens_per_s:.0f}" if worker.tokens_per_s else "-",
            _memory(worker),
            str(worker.restarts),
            f"{worker.pid} on {worker.host}" if worker.pid else "-",
        )
    return table


def _ready(fleet: FleetStatus) -> str:
    return f"workers ready: {fleet.current} of {fleet.target}"


def _memory(worker: WorkerStatus) -> str:
    """Of the host and, where it is known, of the devices."""
    if not worker.host_bytes:
        return "-"
    devices = f" + {worker.device_bytes / 1e9:.1f}" if worker.device_bytes >= 0 else ""
    return f"{worker.host_bytes / 1e9:.1f}{devices} GB"


def _show(fleet: FleetStatus, console: Console) -> None:
    """Prints the table, and the last errors below it."""
    console.print(fleet_table(fleet))
    failed = [
        f"{one.name} failed last: {one.last_error}" for one in fleet.workers if one.last_error
    ]
    for line in [*failed, *([fleet.notice] if fleet.notice else [])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def waited_for(fleet: FleetStatus, drained: str | None) -> str:
    """What the fleet still lacks to its target; '' once it has reached it.

    Args:
        fleet: as last seen.
        drained: a worker that must have ended; None compares the fleet with its target.
    """
    states = {worker.name: worker.state for worker in fleet.workers}
    if drained is not None:
        state = states.get(drained, WorkerState.GONE)
        return "" if state is WorkerState.GONE else f"{drained} is {state.value}"
    moving = [
        f"{name} is {state.value}"
        for name, state in states.items()
        if state in (WorkerState.STARTING, WorkerState.DRAINING)
    ]
    if fleet.current == fleet.target and not moving:
        return ""
    return ", ".join([_ready(fleet), *moving])


def _change(client: ControlClient, given: argparse.Namespace, console: Console) -> None:
    if given.drain is None:
        accepted = _ask(lambda timeout_s: client.scale(given.rollout_workers, timeout_s))
    else:
        accepted = _ask(lambda timeout_s: client.drain(given.drain, timeout_s))
    console.print(
        f"accepted: rollout workers wanted {accepted.target}, ready {accepted.current}",
        highlight=False,
    )
    if not given.wait:
        return
    deadline, shown = time.monotonic() + given.wait, ""
    while True:
        try:
            fleet = _ask(client.fleet, max(1.0, deadline - time.monotonic()))
        except NotControllable:
            check_running(given.run)  # has a better message if the run has ended meanwhile
            raise
        if fleet.target != accepted.target:
            raise _taken_back(fleet, accepted.target)
        what = waited_for(fleet, given.drain)
        if not what:
            _show(fleet, console)
            return
        if time.monotonic() > deadline:
            check_running(given.run)
            raise NotReached(
                f"waited {given.wait:g} s and {what}; the run goes on with the change: check again "
                f"with python -m driver.scale --run {given.run}"
            )
        if what != shown:
            console.print(f"waiting: {what}", highlight=False)
            shown = what
        time.sleep(min(POLL_S, given.wait))


def _taken_back(fleet: FleetStatus, wanted: int) -> RunError:
    text = f"{wanted} rollout workers were accepted, but the run's target is {fleet.target} now"
    if fleet.notice and fleet.target < wanted:
        return NoRoom(f"{text}: {fleet.notice}")
    return NotReached(f"{text}: its policy or another command changed it")


def _ask(call: Callable[[float], T], timeout_s: float = ANSWER_S) -> T:
    """The result of a call of the client; a refusal ends this command."""
    try:
        return call(min(timeout_s, ANSWER_S))
    except (OutOfBounds, NoSuchWorker) as error:
        raise Refused(str(error)) from error
    except (NotNow, TimeoutError, PermissionError, ControlFailed) as error:
        raise NotControllable(str(error)) from error


def _count(text: str) -> int:
    """A number of workers; the run decides which numbers it allows."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers: give 1, 2, 3, ...")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 604_800:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, between 0 and a week")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
