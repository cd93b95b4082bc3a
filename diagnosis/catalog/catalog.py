"""The metrics and phases of a run: title, unit, description, and the view that shows them.

`metric_rows.py` has the rows. A word in braces is a placeholder: `{scorer}`
for the name of a reward function, `{source}` for one of several training sources, `{set}` for one
of several held-out sets, `{process}` for `learner` or a worker. The metrics of evaluations are
those of a single set, and each is there again for one of several.
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
    "source": "[^/]+",
    "phase": "|".join(PHASES),
    "thread": "[a-z_]+",
    "set": "[^/]+",
    "n": "[0-9]+",
}
"""Patterns of the placeholders."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or one pattern of names."""

    name: str
    title: str
    unit: str
    """Empty for a number without a unit, such as a count or a fraction."""
    description: str
    view: str
    """Id of the view of the page that shows it: breakdown, timeline, learning, trust, fleet."""
    group: str
    """Metrics of one view and group share a chart."""
    charted: bool
    """Whether the page always loads its history."""

    @property
    def is_pattern(self) -> bool:
        """Whether the name has a placeholder."""
        return "{" in self.name

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the placeholders."""
        return tuple(BRACES.split(self.name)[1::2])

    def read(self, name: str) -> dict[str, str] | None:
        """The value of each placeholder in a metric's name; None if it does not match this row."""
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
        (
            "publish",
            "publish",
            "publish",
            "the learner makes the new version available to the workers",
        ),
        ("compile", "compile", "compile", "XLA compiles a program for a new shape"),
        (
            "checkpoint",
            "checkpoint",
            "checkpoint",
            "the learner copies its state to write it to disk",
        ),
        ("eval", "evaluation", "eval", "a worker completes held-out prompts"),
        ("idle", "idle", "waiting", "the process has nothing to do while others work"),
        ("unexplained", "unexplained", "unexplained", "time that belongs to no phase"),
        (
            "environment",
            "environment",
            "scoring",
            "a worker waits for environments",
        ),
    )
)


_OF_A_SET = "eval/"
"""Beginning of the metrics of a held-out set."""


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
    """The metrics of a text in the format that `metric_rows.py` explains."""
    view, group = "", ""
    lines = rows.strip().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("["):
            view, group = line.strip("[]").split()
        elif not line.startswith(" "):
            name, unit, title = (cell.strip() for cell in line.split("|"))
            about = itertools.takewhile(lambda one: one.startswith(" "), lines[at + 1 :])
            found = Metric(
                name=name,
                title=title,
                unit=unit,
                description=" ".join(part.strip() for part in about),
                view=view,
                group=group.removesuffix("-"),
                charted=not group.endswith("-"),
            )
            yield found
            if name.startswith(_OF_A_SET):
                yield _of_one_set(found)


def _of_one_set(metric: Metric) -> Metric:
    """The same metric of one of several held-out sets."""
    return dataclasses.replace(
        metric,
        name=metric.name.replace(_OF_A_SET, f"{_OF_A_SET}{{set}}/", 1),
        title=f"{metric.title}, of one set",
        description=f"of one of several held-out sets: {metric.description}",
    )


METRICS: tuple[Metric, ...] = tuple(_read(METRIC_ROWS))
_EXACT = {metric.name: metric for metric in METRICS if not metric.is_pattern}
_PATTERNS = tuple(metric for metric in METRICS if metric.is_pattern)


@functools.lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """The row that describes a metric; None for a name that Tandem itself does not write."""
    if name in _EXACT:
        return _EXACT[name]
    return next((metric for metric in _PATTERNS if metric.read(name) is not None), None)


def is_charted(name: str) -> bool:
    """Whether the page always loads the history of this metric.

    A name that is not in the catalog is a user's own metric, and is charted.
    """
    metric = find(name)
    return metric is None or metric.charted


def charted(names: Iterable[str]) -> list[str]:
    """The names whose history the page always loads, in order."""
    return [name for name in names if is_charted(name)]


def catalog_json() -> dict[str, Any]:
    """The answer of /api/catalog."""
    metrics = []
    for metric in METRICS:
        row = dataclasses.asdict(metric)
        name = row.pop("name")
        metrics.append({"pattern" if metric.is_pattern else "name": name, **row})
    return {"metrics": metrics, "phases": [dataclasses.asdict(phase) for phase in PHASE_ROWS]}
