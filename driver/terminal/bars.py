"""Where the seconds of a step went, as coloured bars of text for the terminal.

A segment carries the name of its phases where it is long enough, so that colour is no more than a
help. Waits are dotted; what no phase claims is hatched.
"""

import math
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from diagnosis.judgement.breakdown import OTHER, PHASE_GROUPS, by_group, critical_path
from diagnosis.judgement.judge import duration
from diagnosis.records.facts import StepFacts
from services.process.phases import LEARNER, UNEXPLAINED

WAITING = "waiting"
ORDER = (*PHASE_GROUPS, OTHER)
"""Of segments in a bar: waits last but for what is unexplained."""
_COLORS = {
    "prefill": ("#7cc4ee", "#000000"),
    "decode": ("#0072b2", "#ffffff"),
    "scoring": ("#4fc29f", "#000000"),
    "publish": ("#006b50", "#ffffff"),
    "weights": ("#b06c00", "#ffffff"),
    "update": ("#e2711d", "#000000"),
    "compile": ("#6b7280", "#ffffff"),
    "checkpoint": ("#a58fd0", "#000000"),
    "eval": ("#5a3d94", "#ffffff"),
}
"""Background and text; those of the page, from Okabe and Ito's palette."""
_PALE = Style(color="#8b95a3")
_STARK = Style(color="#d1007f", bold=True)
_LETTERS = {
    **{"prefill": "p", "decode": "d", "scoring": "s", "weights": "w"},
    **{"update": "U", "publish": "P", "compile": "C", "checkpoint": "K", "eval": "E"},
}
"""Of a bar without colours."""
_FILLS = {WAITING: "·", UNEXPLAINED: "▒", OTHER: "▒"}
WORKERS_SHOWN = 6
NAME_WIDTH = 13
SHARE_WIDTH = 13
_SPARKS = "▁▂▃▄▅▆▇█"


def bar(phase_s: Mapping[str, float], total_s: float, width: int, *, coloured: bool) -> Text:
    """One bar of `width` cells for `total_s` seconds; the seconds fill it in the order of ORDER.

    Args:
        phase_s: seconds by phase, or `other`.
        coloured: without colours cells are letters.
    """
    groups = by_group(phase_s)
    named = [(name, groups.get(name, 0.0)) for name in ORDER]
    text = Text(no_wrap=True)
    for (name, _), cells in zip(named, _cells([s for _, s in named], total_s, width), strict=True):
        if cells:
            text.append(*_segment(name, cells, coloured))
    return text


def step_bars(facts: StepFacts, width: int, *, coloured: bool = True) -> Group:
    """A bar for every process and for the critical path, and a legend of what is in them.

    Args:
        width: columns of the terminal.
    """
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, width=NAME_WIDTH)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, width=SHARE_WIDTH)
    cells = max(10, width - NAME_WIDTH - SHARE_WIDTH - 3)
    shown, hidden = _processes(facts)
    path = critical_path(facts)
    for name in shown:
        row = facts.processes[name]
        share = facts.busy_s(name) / facts.wall_s
        grid.add_row(
            Text(name),
            bar(row, max(facts.wall_s, sum(row.values())), cells, coloured=coloured),
            Text(f"{share * 100:.0f} % at work"),
        )
    if hidden:
        shares = [facts.busy_s(name) / facts.wall_s * 100 for name in hidden]
        text = f"{min(shares):.0f} to {max(shares):.0f} % at work"
        grid.add_row(Text(f"and {len(hidden)} more"), Text(text, style=_PALE), Text())
    total_s = max(facts.wall_s, sum(path.values()))
    grid.add_row(
        Text("critical path", style="bold"),
        bar(path, total_s, cells, coloured=coloured),
        Text(f"{facts.wall_s:.2f} s"),
    )
    return Group(grid, _legend(facts, path, coloured))


def progress(step: int, total: int, left_s: float, width: int) -> Text:
    """`step 12 of 40 [####    ] 30 %, about 2 min 10 s left`.

    Args:
        total: 0 where it is not known.
        left_s: seconds until the end; NaN where they are not known, as of a run that is over.
    """
    if not total:
        return Text(f"step {step}", style="bold")
    fraction = min(1.0, step / total)
    cells = max(10, min(40, width - 50))
    done = round(fraction * cells)
    text = Text(f"step {step} of {total} ", style="bold")
    text.append("━" * done, style="#009e73")
    text.append("─" * (cells - done), style=_PALE)
    text.append(f" {fraction * 100:.0f} %", style="bold")
    if left_s > 0:
        text.append(f", about {duration(left_s)} left", style="bold")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as blocks between their least and greatest; `!` is one that is not finite."""
    values = values[-width:]
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "!" * len(values)
    low, high = min(known), max(known)
    top = len(_SPARKS) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(
        _SPARKS[round((value - low) * scale) if scale else top // 2]
        if math.isfinite(value)
        else "!"
        for value in values
    )


def _processes(facts: StepFacts) -> tuple[list[str], list[str]]:
    """Names in the order of the ledger: those that are shown, and the least busy of many."""
    workers = facts.workers
    busiest = sorted(workers, key=facts.busy_s, reverse=True)[:WORKERS_SHOWN]
    shown = [name for name in facts.processes if name == LEARNER or name in busiest]
    return shown, [name for name in workers if name not in busiest]


def _cells(seconds: Sequence[float], total_s: float, width: int) -> list[int]:
    """Cells by largest remainder, so that a full bar is exactly `width` wide."""
    if total_s <= 0:
        return [0] * len(seconds)
    exact = [max(0.0, s) / total_s * width for s in seconds]
    cells = [math.floor(x) for x in exact]
    left = min(width, round(sum(exact))) - sum(cells)
    by_rest = sorted(range(len(exact)), key=lambda i: exact[i] - cells[i], reverse=True)
    for i in by_rest[: max(0, left)]:
        cells[i] += 1
    return cells


def _segment(name: str, cells: int, coloured: bool) -> tuple[str, Style]:
    fill = _fill(name, coloured)
    label = f" {name} " if cells >= len(name) + 2 else ""
    return label.center(cells, fill) if label else fill * cells, _style(name, coloured)


def _fill(name: str, coloured: bool) -> str:
    return _FILLS.get(name) or (" " if coloured else _LETTERS[name])


def _style(name: str, coloured: bool) -> Style:
    if name in (UNEXPLAINED, OTHER):
        return _STARK
    if name not in _COLORS or not coloured:
        return _PALE if name == WAITING else Style()
    background, ink = _COLORS[name]
    return Style(color=ink, bgcolor=background)


def _legend(facts: StepFacts, path: Mapping[str, float], coloured: bool) -> Text:
    """The phases that are in the bars, in their order."""
    seconds: dict[str, float] = dict(by_group(path))
    for row in facts.processes.values():
        for name, s in by_group(row).items():
            seconds[name] = max(seconds.get(name, 0.0), s)
    text = Text(no_wrap=False)
    for name in ORDER:
        if seconds.get(name, 0.0) >= 0.005 * facts.wall_s:
            text.append(_fill(name, coloured) * 2, style=_style(name, coloured))
            text.append(f" {name}  ")
    text.rstrip()
    return text
