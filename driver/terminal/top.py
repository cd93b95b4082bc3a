"""Shows a run in the terminal, from its folder: bars, sparklines, workers, alerts.

    python -m driver.top --run DIR [--once] [--every SECONDS]

It reads files and asks the driver for its workers, and changes nothing. Ctrl-C leaves; the run goes
on. Where the output is no terminal it prints once.
"""

import argparse
import contextlib
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diagnosis.judgement.judge import Judge
from diagnosis.records.run_log import RunLog
from driver.errors import NoRun, RunError
from driver.reports.status import ExitCode
from driver.terminal import bars
from driver.terminal.harmless import Harmless, harmless_console
from driver.terminal.scale import fleet_table
from services.control.access import NoAccess, read_access
from services.control.client import ControlClient, ControlFailed
from services.control.messages import FleetStatus, WorkerState
from services.process.run_processes import state_of_run

ANSWER_S = 2.0
"""For the driver to report its workers: it always has an answer ready."""
PLAIN_WIDTH = 120
"""Columns where the output is no terminal."""
ALERTS_SHOWN = 4
LINES = {
    "reward": "reward/total/mean",
    "accuracy": "eval/accuracy/strict",
    "length": "rollout/completion_len_mean",
    "step s": "time/train/step_s",
    "tok/s": "throughput/train/decode_tokens_per_s",
}
"""Title of a sparkline -> metric."""
_ENDS = {
    "finished": "the run finished",
    "failed": "the run failed",
    "interrupted": "the run was interrupted",
    "lost": "the driver ended without a final status; go on with --resume",
}
_MARKS = {
    "bad": ("✖ act", "bold #d55e00"),
    "warn": ("▲ look", "#e69f00"),
    "info": ("◆ note", "#56b4e9"),
}
"""Shape and word of an alert, as on the page."""


class FleetView:
    """Asks the driver of a run for its workers."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._client: ControlClient | None = None
        self.why = ""
        """Why the driver does not answer; empty where it does."""

    def poll_fleet(self) -> FleetStatus | None:
        """The fleet, or None and `why` where the driver does not answer."""
        try:
            if self._client is None:
                self._client = ControlClient(*read_access(self._folder))
            fleet = self._client.fleet(ANSWER_S)
        except (NoAccess, PermissionError, TimeoutError, ControlFailed) as error:
            self.why = str(error)
            self.close()
            return None
        self.why = ""
        return fleet

    def close(self) -> None:
        """Closes the connection."""
        if self._client is not None:
            self._client.close()
        self._client = None


class Top:
    """Follows one run and draws it."""

    def __init__(self, folder: pathlib.Path):
        """Raises:
        NoRun: if the folder is not that of a run.
        """
        self._folder = folder
        try:
            self._log = RunLog(folder)
        except ValueError as error:
            raise NoRun(str(error)) from error
        if not (folder / "status.json").exists():
            raise NoRun(
                f"{folder} holds no status.json: give the output folder of a run, as its first "
                "line of output names it"
            )
        self._fleet_view = FleetView(folder)
        self._fleet: FleetStatus | None = None
        self._judge: Judge | None = None
        self.state = "running"

    def refresh(self) -> None:
        """Reads what is new in the run's folder."""
        changes = self._log.refresh()
        self.state = state_of_run(self._folder, self._log.status)
        if self._judge is None or changes.reloaded:
            self._judge = Judge(self._log.settings)
        self._fleet = self._fleet_view.poll_fleet() if self.state == "running" else None
        workers = () if self._fleet is None else self._fleet.workers
        self._judge.set_workers(
            starting=any(worker.state is WorkerState.STARTING for worker in workers),
            hosts=len({worker.host for worker in workers if worker.host}),
        )
        for facts in changes.new_steps:
            self._judge.add_step(facts)

    def close(self) -> None:
        """Closes the connection to the driver."""
        self._fleet_view.close()

    def render(self, width: int, *, coloured: bool, now: float) -> Group:
        """Everything, as wide as the terminal.

        Args:
            now: Unix seconds.
        """
        assert self._judge is not None, "refresh comes first"
        verdict = self._judge.verdict(now, {"state": self.state})
        parts: list[RenderableType] = [self._head()]
        progress = verdict["progress"]
        left_s = math.nan if progress["remaining_s"] is None else progress["remaining_s"]
        parts.append(bars.progress(progress["step"], progress["total"], left_s, width))
        last = self._log.step(self._log.last_step)
        if last is None:
            parts.append(Text("no step was closed yet"))
        else:
            parts += [Text(), bars.step_bars(last, width, coloured=coloured)]
        if verdict["bottleneck"]:
            parts.append(Text(verdict["bottleneck"]["text"]))
        parts += [Text(), self._sparklines(width)]
        parts += self._workers()
        parts += [Text(), *_alerts(verdict["alerts"])]
        return Group(*parts)

    def ending(self) -> str:
        """The last line for a run that is over; empty while it goes on."""
        if self.state == "running":
            return ""
        status = self._log.status
        reason = f": {status['reason']}" if status.get("reason") else ""
        return f"{_ENDS.get(self.state, self.state)} after step {status.get('step', 0)}{reason}"

    def _head(self) -> Text:
        status = self._log.status
        text = Text().append(f"{status.get('run', self._folder.name)} ", style="bold")
        return text.append(f"{self.state}  {self._folder}")

    def _sparklines(self, width: int) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(no_wrap=True)
        steps = self._log.recent(max(10, width - 30))
        for title, name in LINES.items():
            values = [facts.metrics[name] for facts in steps if name in facts.metrics]
            if values:
                line = bars.sparkline(values, max(10, width - 30))
                grid.add_row(Text(title), Text(f"{values[-1]:.4g}", style="bold"), Text(line))
        return grid

    def _workers(self) -> list[RenderableType]:
        if self._fleet is not None:
            return [Text(), fleet_table(self._fleet)]
        if self.state == "running":
            return [Text(), Text(f"workers: {self._fleet_view.why}")]
        return []


def _alerts(alerts: Sequence[dict]) -> Iterator[Text]:
    """The worst ones, a line each and their advice under it."""
    if not alerts:
        yield Text("no alerts", style="#009e73")
    for alert in alerts[:ALERTS_SHOWN]:
        mark, style = _MARKS[alert["severity"]]
        text = Text().append(f"{mark}: ", style=style)
        text.append(f"{alert['text']} (since step {alert['since_step']})")
        text.append(f"\n  {alert['advice']}", style="#8b95a3")
        yield text
    if len(alerts) > ALERTS_SHOWN:
        yield Text(f"and {len(alerts) - ALERTS_SHOWN} more")


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m driver.top`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.top",
        description="Shows a run in the terminal, from its folder. Ctrl-C leaves; the run goes on.",
        epilog="exit codes: 0 shown, 2 the folder is not that of a run",
    )
    parser.add_argument(
        "--run", required=True, type=pathlib.Path, metavar="DIR", help="output folder of the run"
    )
    parser.add_argument("--once", action="store_true", help="print once and leave")
    parser.add_argument(
        "--every",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between two refreshes (default: %(default)g)",
    )
    return parser


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Returns the exit code; a user's mistake is one message without a traceback."""
    given = parser().parse_args(arguments)
    console = console or harmless_console(plain_width=PLAIN_WIDTH)
    try:
        with contextlib.closing(Top(given.run)) as top:
            top.refresh()
            if console.is_terminal and not given.once:
                _watch(top, console, given.every)
            else:
                console.print(_rendered(top, console))
            if ending := top.ending():
                console.print(Text(ending), soft_wrap=True)
        return ExitCode.FINISHED
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:  # of another user's run, or on a disk that is gone
        print(f"error: the run cannot be read: {error}", file=sys.stderr, flush=True)
        return NoRun.exit_code


def _watch(top: Top, console: Console, every_s: float) -> None:
    """Draws until the run is over or the user presses Ctrl-C; the last state stays visible."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_rendered(top, console), console=console, auto_refresh=False) as live,
    ):
        while top.state == "running":
            time.sleep(every_s)
            top.refresh()
            live.update(_rendered(top, console), refresh=True)


def _rendered(top: Top, console: Console) -> Harmless:
    coloured = console.color_system is not None
    return Harmless(top.render(console.width, coloured=coloured, now=time.time()))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be 0.1 to 3600 seconds, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
