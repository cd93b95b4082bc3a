"""The critical path of a step: which work of which process determined its length.

In a synchronous step the path is the work of the busiest rollout worker, followed by that of the
learner. If both together are longer than the step, they overlapped: the path is then the longer
side, plus the shorter side for the time in which the longer one waited. The rest of the wall time
is `other`: transfers, and waits for something outside the run's processes.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from diagnosis.catalog.catalog import PHASE_ROWS
from diagnosis.records.facts import StepFacts
from services.process.phases import LEARNER, UNEXPLAINED, WAITS

OTHER = "other"
"""Seconds of a step outside its critical path."""
STARTING_SHARE = 0.1
"""Of the wall time; a step in which a process compiles for longer is not typical."""

PHASE_GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(row.name for row in PHASE_ROWS if row.group == group)
    for group in dict.fromkeys(row.group for row in PHASE_ROWS)
}
"""Phases that share a column and a colour, in the order in which a step meets them."""

_TITLES = {row.name: row.title for row in PHASE_ROWS}
_GROUP_OF = {row.name: row.group for row in PHASE_ROWS}


@dataclasses.dataclass(frozen=True)
class PathSegment:
    """Seconds of one phase of one process on the critical path."""

    process: str
    phase: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The longest segment of the critical path over some steps."""

    text: str
    process: str
    """Empty if the rest outside all processes is longest."""
    phase: str
    share: float
    """Of the wall time of those steps."""


def busiest_worker(facts: StepFacts) -> str | None:
    """The rollout worker with the most busy seconds; None without workers."""
    return max(facts.workers, key=facts.busy_s, default=None)


def is_overlapped(facts: StepFacts) -> bool:
    """Whether learner and busiest worker must have worked at the same time."""
    worker = busiest_worker(facts)
    return worker is not None and facts.busy_s(LEARNER) + facts.busy_s(worker) > facts.wall_s


def path_segments(facts: StepFacts) -> list[PathSegment]:
    """The critical path of a step; its seconds add up to at most about the wall time.

    A worker's wait for weights is on the path if the sides follow each other and it fits: then all
    processes wait for the transfer. If the sides overlap, it is a wait for the learner.
    """
    worker = busiest_worker(facts)
    learner = _busy(facts, LEARNER)
    if worker is None:
        return learner
    rollout = _busy(facts, worker)
    if is_overlapped(facts):
        longer, shorter = sorted((learner, rollout), key=_total, reverse=True)
        return longer + _cut(shorter, max(0.0, facts.wall_s - _total(longer)))
    waited_s = facts.phase_s(worker, "weights_wait")
    if waited_s and _total(learner) + _total(rollout) + waited_s <= facts.wall_s:
        rollout.append(PathSegment(worker, "weights_wait", waited_s))
    return rollout + learner


def critical_path(facts: StepFacts) -> dict[str, float]:
    """Seconds by phase of the critical path, and `other`: the rest of the wall time."""
    path: dict[str, float] = collections.defaultdict(float)
    for segment in path_segments(facts):
        path[segment.phase] += segment.seconds
    return {**path, OTHER: max(0.0, facts.wall_s - sum(path.values()))}


def busy_seconds(facts: StepFacts) -> dict[str, float]:
    """As `critical_path`, but nothing is cut where the sides overlap.

    The phases of learner and busiest worker are then whole, and add up to more than the wall time.
    """
    path = critical_path(facts)
    worker = busiest_worker(facts)
    if worker is None or not is_overlapped(facts):
        return path
    whole: dict[str, float] = collections.defaultdict(float)
    for segment in (*_busy(facts, worker), *_busy(facts, LEARNER)):
        whole[segment.phase] += segment.seconds
    return {**whole, OTHER: path[OTHER]}


def by_group(phase_s: Mapping[str, float]) -> dict[str, float]:
    """Sums phases by their group; a name that is not a phase, such as `other`, stays."""
    groups: dict[str, float] = {}
    for phase, seconds in phase_s.items():
        name = _GROUP_OF.get(phase, phase)
        groups[name] = groups.get(name, 0.0) + seconds
    return groups


def without_starts(recent: Sequence[StepFacts]) -> Sequence[StepFacts]:
    """The steps without those in which a process compiled, unless most of them did.

    A step with compilation may take as long as dozens of others, and is not typical.
    """
    others = [
        facts
        for facts in recent
        if all(
            facts.phase_s(process, "compile") <= STARTING_SHARE * facts.wall_s
            for process in facts.processes
        )
    ]
    return others if 2 * len(others) > len(recent) else recent


def usual_step_s(recent: Sequence[StepFacts]) -> float:
    """Mean seconds of these steps without those that compiled; NaN without a step."""
    usual = without_starts(recent)
    return sum(facts.wall_s for facts in usual) / len(usual) if usual else math.nan


def waiting_share(facts: StepFacts, process: str) -> float:
    """Share of the wall time in which a process waited for another one."""
    return facts.phase_s(process, *WAITS) / facts.wall_s


def bottleneck(recent: Sequence[StepFacts]) -> Bottleneck | None:
    """The longest segment of these steps, in one sentence; None without a step.

    Args:
        recent: trained steps, oldest first; the means over all of them decide.
    """
    if not recent:
        return None
    wall_s = sum(facts.wall_s for facts in recent)
    seconds: dict[tuple[bool, str], float] = collections.defaultdict(float)
    for facts in recent:
        segments = path_segments(facts)
        for segment in segments:
            seconds[segment.process == LEARNER, segment.phase] += segment.seconds
        seconds[False, OTHER] += max(0.0, facts.wall_s - _total(segments))
    (is_learner, phase), most_s = max(seconds.items(), key=lambda item: item[1])
    share = min(1.0, most_s / wall_s)
    numbers = (
        f"{share:.0%} of a step ({most_s / len(recent):.2f} of {wall_s / len(recent):.2f} s)"
    ).replace("%", " %")
    if phase == OTHER:
        text = f"no process accounts for {numbers}: learner and busiest worker both wait"
        return Bottleneck(text=text, process="", phase=phase, share=share)
    process = LEARNER if is_learner else _most_often(busiest_worker(facts) for facts in recent)
    whom = "the learner" if is_learner else process
    text = f"{_TITLES[phase]} of {whom} takes {numbers}"
    if sum(map(is_overlapped, recent)) * 2 > len(recent):
        text += f"; {_other_side(recent, is_learner, process)}"
    return Bottleneck(text=text, process=process, phase=phase, share=share)


def _other_side(recent: Sequence[StepFacts], is_learner: bool, worker: str) -> str:
    """How long the other side waits in overlapped steps."""
    if is_learner:
        names = [busiest_worker(facts) or LEARNER for facts in recent]
        whom = "the busiest worker"
    else:
        names, whom = [LEARNER] * len(recent), "the learner"
    waits = statistics.median(
        waiting_share(facts, name) for facts, name in zip(recent, names, strict=True)
    )
    return f"meanwhile {whom} waits {waits * 100:.0f} % of the time"


def _busy(facts: StepFacts, process: str) -> list[PathSegment]:
    row = facts.processes.get(process, {})
    return [
        PathSegment(process, phase, s)
        for phase, s in row.items()
        if s > 0 and phase not in (*WAITS, UNEXPLAINED)
    ]


def _cut(segments: Sequence[PathSegment], seconds: float) -> list[PathSegment]:
    """The segments, scaled down to at most `seconds` in all."""
    share = min(1.0, seconds / (_total(segments) or 1.0))
    return [
        dataclasses.replace(segment, seconds=share * segment.seconds)
        for segment in segments
        if share
    ]


def _total(segments: Iterable[PathSegment]) -> float:
    return sum(segment.seconds for segment in segments)


def _most_often(names: Iterable[str | None]) -> str:
    ((name, _),) = collections.Counter(name or "" for name in names).most_common(1)
    return name
