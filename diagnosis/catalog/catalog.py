"""What every metric and phase of a run means: title, unit, description, and where it is shown.

`metric_rows.py` has the rows. A word in braces stands for what differs between runs: `{scorer}`
for the name of a reward function, `{process}` for `learner` or a worker.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from diagnosis.catalog.metric_rows import METRIC_ROWS
from services.process.phases import PHASES

BRACES = re.compile(r"\{(\w+)\}")
_PLACES = {
    "scorer": ".+",
    "process": "[^/]+",
    "phase": "|".join(PHASES),
    "thread": "[a-z_]+",
    "n": "[0-9]+",
}
"""What a word in braces may stand for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or one pattern of names."""

    name: str
    title: str
    unit: str
    """Empty where the number has none, such as a count or a fraction that says so in its title."""
    description: str
    view: str
    """Id of the page's view that shows it: breakdown, timeline, learning, trust, fleet."""
    group: str
    """Metrics of one view and group share a chart."""
    charted: bool
    """Whether the page loads its history without being asked for it."""

    @property
    def is_pattern(self) -> bool:
        return "{" in self.name

    @property
    def words(self) -> tuple[str, ...]:
        """Those in braces."""
        return tuple(BRACES.split(self.name)[1::2])

    def read(self, name: str) -> dict[str, str] | None:
        """What stands for each word in braces in the name of a metric; None if this row does not
        describe it.
        """
        found = _pattern(self.name).fullmatch(name)
        return found and found.groupdict()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of the ledger."""

    name: str
    title: str
    description: str
    group: str
    """Phases of one group share a colour and a column: see `breakdown.PHASE_GROUPS`."""


PHASE_ROWS: tuple[Phase, ...] = tuple(
    Phase(name=name, title=title, group=group, description=description)
    for name, title, group, description in (
        ("prefill", "prefill", "prefill", "a worker runs prompts through the model once"),
        ("decode", "decode", "decode", "a worker draws completions, token by token"),
        ("reward", "scoring", "scoring", "a worker waits for reward functions"),
        ("serialise", "serialise", "publish", "messages are packed or recorded"),
        ("wire", "wire", "weights", "a worker pulls weights over the network"),
        ("queue_wait", "queue wait", "waiting", "the learner waits for groups in its buffer"),
        ("weights_wait", "weights wait", "weights", "a worker waits for a newer policy version"),
        ("weights_swap", "weights swap", "weights", "a worker puts new weights on its devices"),
        ("forward_backward", "forward, backward", "update", "the learner computes gradients"),
        ("optimizer", "optimizer", "update", "the learner applies the gradients"),
        ("publish", "publish", "publish", "the learner offers the new version to the workers"),
        ("compile", "compile", "compile", "XLA compiles a program for a new shape"),
        ("checkpoint", "checkpoint", "checkpoint", "the learner copies its state for the disk"),
        ("eval", "evaluation", "eval", "a worker completes held-out prompts"),
        ("idle", "idle", "waiting", "the process has nothing to do: others are at work"),
        ("unexplained", "unexplained", "unexplained", "no phase claims this time"),
    )
)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = BRACES.split(name)
    return re.compile(
        "".join(
            f"(?P<{part}>{_PLACES[part]})" if i % 2 else re.escape(part)
            for i, part in enumerate(parts)
        )
    )


def _read(rows: str) -> Iterator[Metric]:
    """The metrics of a text as `metric_rows.py` explains it."""
    view, group = "", ""
    lines = rows.strip().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("["):
            view, group = line.strip("[]").split()
        elif not line.startswith(" "):
            name, unit, title = (cell.strip() for cell in line.split("|"))
            about = itertools.takewhile(lambda one: one.startswith(" "), lines[at + 1 :])
            yield Metric(
                name=name,
                title=title,
                unit=unit,
                description=" ".join(part.strip() for part in about),
                view=view,
                group=group.removesuffix("-"),
                charted=not group.endswith("-"),
            )


METRICS: tuple[Metric, ...] = tuple(_read(METRIC_ROWS))
_EXACT = {metric.name: metric for metric in METRICS if not metric.is_pattern}
_PATTERNS = tuple(metric for metric in METRICS if metric.is_pattern)


@functools.lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """The row that describes a metric; None for a name that no part of Tandem writes."""
    if name in _EXACT:
        return _EXACT[name]
    return next((metric for metric in _PATTERNS if metric.read(name) is not None), None)


def is_charted(name: str) -> bool:
    """Whether the page loads the history of this metric without being asked for it.

    A name that is not in the catalog is charted: it is somebody's own, who wants to see it.
    """
    metric = find(name)
    return metric is None or metric.charted


def charted(names: Iterable[str]) -> list[str]:
    """Those names whose history the page loads, in their order."""
    return [name for name in names if is_charted(name)]


def catalog_json() -> dict[str, Any]:
    """The answer of /api/catalog."""
    metrics = []
    for metric in METRICS:
        row = dataclasses.asdict(metric)
        name = row.pop("name")
        metrics.append({"pattern" if metric.is_pattern else "name": name, **row})
    return {"metrics": metrics, "phases": [dataclasses.asdict(phase) for phase in PHASE_ROWS]}
