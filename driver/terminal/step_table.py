"""What a terminal shows of a run: a table of steps with the time of each phase.

On a terminal the table grows in place, and under it are the last step's bars and the time left;
elsewhere, as in the log of `ray job submit`, each step is one line of fixed columns and the header
comes again every twenty lines. The phases shown are those of the busiest worker and of the learner
(`busy_seconds` in diagnosis/judgement/breakdown.py).
"""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from diagnosis.judgement.breakdown import OTHER, busy_seconds, by_group, usual_step_s
from diagnosis.judgement.recent import WINDOW
from diagnosis.records.facts import StepFacts
from driver.accounting.ledger import StepRecord
from driver.terminal import bars
from driver.terminal.harmless import Harmless, harmless_console

PHASE_COLUMNS = {
    **{"weights": "weights", "prefill": "prefill", "decode": "decode", "scoring": "scoring"},
    **{"update": "update", "publish": "publish", "ckpt": "checkpoint", "eval": "eval"},
    **{"compile": "compile", OTHER: OTHER},
}
"""Column of the table -> group of phases (`breakdown.PHASE_GROUPS`)."""

COLUMNS = ("step", "reward", "acc", "len", "tok/s", "step s", *PHASE_COLUMNS)
WIDTHS = (9, 8, 6, 7, 7, 8, *(7 if name == OTHER else 8 for name in PHASE_COLUMNS))
HEADER_EVERY = 20
LIVE_ROWS = 20
"""Steps that stay visible on a terminal that is high enough."""
FEWEST_ROWS = 3
OTHER_LINES = 14
"""Of a terminal: title and head of the table, progress, legend, and bars of a few processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """The numbers of one step that the table shows."""

    step: int
    total_steps: int
    step_s: float
    reward_mean: float | None
    """None, as in the next three, where the step did not measure it."""
    accuracy: float | None
    completion_len_mean: float | None
    tokens_per_s: float | None
    phase_s: dict[str, float]
    """Seconds of the busiest worker and of the learner by PHASE_COLUMNS. They add up to step_s, or
    to more where the two worked at the same time."""
    facts: StepFacts

    def cells(self) -> tuple[str, ...]:
        """The text of every column, in the order of COLUMNS."""
        return (
            f"{self.step}/{self.total_steps}",
            _number(self.reward_mean, 3),
            _number(self.accuracy, 3),
            _number(self.completion_len_mean, 1),
            _number(self.tokens_per_s, 0),
            f"{self.step_s:.2f}",
            *(f"{self.phase_s[name]:.2f}" for name in PHASE_COLUMNS),
        )


def step_row(metrics: Mapping[str, float], record: StepRecord, total_steps: int) -> StepRow:
    """Picks the numbers of one step from its metrics and its ledger record.

    Args:
        metrics: by the names of the metrics log; those that are absent show as `-`.
        record: seconds by phase of every process.
    """
    facts = StepFacts(
        step=record.step,
        time=0.0,
        wall_s=record.wall_s,
        processes=record.processes,
        metrics=metrics,
    )
    groups = by_group(busy_seconds(facts))
    return StepRow(
        step=record.step,
        total_steps=total_steps,
        step_s=record.wall_s,
        reward_mean=metrics.get("reward/total/mean"),
        accuracy=metrics.get("eval/accuracy/strict"),
        completion_len_mean=metrics.get("rollout/completion_len_mean"),
        tokens_per_s=metrics.get("throughput/train/decode_tokens_per_s"),
        phase_s={column: groups.get(group, 0.0) for column, group in PHASE_COLUMNS.items()},
        facts=facts,
    )


class StepView:
    """Owns the terminal while steps run, as a context manager; each `add_step` shows one."""

    def __init__(self, name: str, total_steps: int, console: Console | None = None):
        self._name = name
        self._total_steps = total_steps
        self._console = console or harmless_console()
        self._rows: deque[StepRow] = deque(maxlen=LIVE_ROWS)
        self._shown = 0
        self._live: Live | None = None

    def __enter__(self) -> "StepView":
        if self._console.is_terminal:
            self._live = Live(Harmless(self._drawn()), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add_step(self, metrics: Mapping[str, float], record: StepRecord) -> None:
        """Adds one step."""
        row = step_row(metrics, record, self._total_steps)
        self._rows.append(row)
        self._shown += 1
        if self._live is not None:
            self._live.update(Harmless(self._drawn()), refresh=True)
            return
        if (self._shown - 1) % HEADER_EVERY == 0:
            self.say(plain_line(COLUMNS))
        self.say(plain_line(row.cells()))

    def say(self, text: str) -> None:
        """Prints a line, above the table on a terminal."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _drawn(self) -> Group:
        """The table, and under it the last step's bars and the remaining time."""
        if not self._rows:
            return Group(self._table())
        last, width = self._rows[-1], self._console.width
        trained = [row.facts for row in self._rows if row.facts.trained]
        left_s = usual_step_s(trained[-WINDOW:]) * (last.total_steps - last.step)
        return Group(
            self._table(),
            bars.progress(last.step, last.total_steps, left_s, width),
            bars.step_bars(last.facts, width, coloured=self._console.color_system is not None),
        )

    def _table(self) -> Table:
        room = max(FEWEST_ROWS, min(LIVE_ROWS, self._console.height - OTHER_LINES))
        hidden = max(0, self._shown - room)
        title = self._name + (f" (the first {hidden} steps are in metrics.jsonl)" if hidden else "")
        table = Table(title=title, title_justify="left", header_style="bold")
        for column in COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for row in list(self._rows)[-room:]:
            table.add_row(*row.cells())
        return table


def plain_line(cells: Sequence[str]) -> str:
    """One line of right-aligned fixed columns; a cell that is too wide pushes the rest."""
    return " ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
