"""The last lines of a run: rewards, accuracy, and where its outputs are."""

import dataclasses
from collections.abc import Mapping, Sequence

from driver.accounting.accuracy import Accuracy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Results of a finished or interrupted run."""

    name: str
    rewards: Sequence[float]
    """Mean total reward of every step, in order."""
    accuracy: Mapping[str, Mapping[int, Accuracy | None]]
    """By held-out set and the step that was evaluated, 0 before the first; None where it is not
    known what is right."""
    seconds: float
    outputs: Mapping[str, str]
    """Path by content, such as {"policy": "runs/demo/export"}."""
    resumed_at: int | None = None
    """The step that this start of the run went on from; None where it was no resume."""


def summary_lines(summary: RunSummary) -> list[str]:
    """The last lines of a run; scripts read the very last one."""
    first, last = _ends(summary.rewards)
    steps = "step" if len(first) == 1 else f"{len(first)} steps"
    lines = [
        f"reward of the first {steps}  {_number(_mean(first), 3)}",
        f"reward of the last {steps}   {_number(_mean(last), 3)}",
    ]
    for name, by_step in (summary.accuracy or {"": {}}).items():
        before, after = (_shown(by_step, step) for step in _evaluated(by_step))
        of = f" of {name}" if name else ""
        lines += [
            f"held-out accuracy{of} before   {before}",
            f"held-out accuracy{of} after    {after}",
        ]
    if summary.resumed_at == len(summary.rewards):
        nothing = "no step was trained since --resume"
        earlier = f": these are the figures of {len(summary.rewards)} earlier steps"
        lines.insert(0, nothing + earlier * bool(summary.rewards))
    lines += [f"{what}: {where}" for what, where in summary.outputs.items()]
    return [*lines, machine_line(summary)]


def machine_line(summary: RunSummary) -> str:
    """`demo: accuracy 0.31 -> 0.86, reward 0.35 -> 0.91, steps 60, seconds 214`; n/a is unknown.

    Of several held-out sets, the accuracy is that of the first.
    """
    first_set = next(iter(summary.accuracy.values()), {})
    counts = [first_set.get(step) for step in _evaluated(first_set)]
    before, after = (_number(count.fraction if count else None, 2) for count in counts)
    first, last = (_number(_mean(rewards), 2) for rewards in _ends(summary.rewards))
    return (
        f"{summary.name}: accuracy {before} -> {after}, reward {first} -> {last}, "
        f"steps {len(summary.rewards)}, seconds {summary.seconds:.0f}"
    )


def _evaluated(accuracy: Mapping[int, Accuracy | None]) -> tuple[int, int]:
    """The steps of the evaluations before the first step and after the last; -1 is none."""
    return (0 if 0 in accuracy else -1), max([step for step in accuracy if step > 0], default=-1)


def _shown(accuracy: Mapping[int, Accuracy | None], step: int) -> str:
    if step not in accuracy:
        return "not evaluated"
    return str(
        accuracy[step] or "not known: set eval.correct_from to the least reward that is right"
    )


def _ends(rewards: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first and the last five steps, or halves of a shorter run, so that none is in both."""
    few = min(5, (len(rewards) + 1) // 2)
    return rewards[:few], rewards[len(rewards) - few :]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
