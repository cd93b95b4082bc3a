"""Whether a run needs one rollout worker more or fewer, judged by which side waits.

`policy: balance` adds a worker while the learner waits for groups, and drains one while the workers
wait for the learner and one fewer would still keep up. The decision is a function of what was
measured; nothing here starts or stops anything.
"""

import dataclasses
from collections.abc import Mapping

from services.process.phases import LEARNER, WAITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWaits:
    """How long each side waited in one step, as shares of its seconds between 0 and 1."""

    learner: float
    """In which the learner had no groups to train on."""
    workers: float
    """In which a rollout worker had nothing to do, as the mean over them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceRule:
    """When waiting is too much; the defaults never ask to add and to drain at the same size.

    A worker is added where the learner waits for more than `add_above` of the step. The addition
    cannot be taken back while the rollout takes as long as before: in a run whose two sides overlap
    the workers that are left would be busier than `busy_below` allows, and in one whose sides take
    turns the learner still waits for at least half of what it did, which is above `drain_below`.
    """

    steps: int = 5
    """Steps in a row that must agree."""
    cool_down_steps: int = 2
    """Steps after a change that are not judged: caches fill, programs compile."""
    add_above: float = 0.15
    drain_below: float = 0.05
    """A worker is drained only if the learner waited for less than this."""
    busy_below: float = 0.9
    """And if those that are left would be busy for less than this."""

    def __post_init__(self):
        if self.steps < 1 or self.cool_down_steps < 0:
            raise ValueError(f"steps must be at least 1 and cool_down_steps 0, got {self}")
        if not 0 <= 2 * self.drain_below < self.add_above < 1 or not 0 < self.busy_below < 1:
            raise ValueError(
                "add_above must lie below 1 and above twice drain_below, and busy_below between 0 "
                f"and 1, got {self}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceState:
    """What earlier steps leave behind for the next decision."""

    wishes: tuple[int, ...] = ()
    """What each of the last steps asked for by itself: +1, -1 or 0."""
    cool_down: int = 0
    """Steps that are still not judged."""


def waits_of(phases: Mapping[str, Mapping[str, float]], wall_s: float) -> StepWaits:
    """How long each side waited, by the ledger of one step.

    Args:
        phases: seconds by process and phase, as in ledger.jsonl.
        wall_s: seconds of the step, > 0.
    """
    if not wall_s > 0:
        raise ValueError(f"wall_s must be positive, got {wall_s}")

    def share(process: str) -> float:
        return min(1.0, sum(phases[process].get(name, 0.0) for name in WAITS) / wall_s)

    workers = [share(name) for name in phases if name != LEARNER]
    return StepWaits(
        learner=share(LEARNER) if LEARNER in phases else 0.0,
        workers=sum(workers) / len(workers) if workers else 0.0,
    )


def wish(waits: StepWaits, workers: int, rule: BalanceRule) -> int:
    """What one step asks for by itself: +1, -1 or 0 workers.

    Args:
        waits: of a step with that number of workers.
        workers: >= 1.
        rule: the thresholds.
    """
    if waits.learner > rule.add_above:
        return 1
    if workers > 1 and waits.learner < rule.drain_below:
        busy_with_one_fewer = (1 - waits.workers) * workers / (workers - 1)
        return -1 if busy_with_one_fewer < rule.busy_below else 0
    return 0


def balance(
    state: BalanceState,
    waits: StepWaits,
    *,
    workers: int,
    target: int,
    least: int,
    most: int,
    rule: BalanceRule,
) -> tuple[BalanceState, int]:
    """Judges one step.

    Args:
        state: as the judgement of the step before left it; `BalanceState()` at first.
        waits: of this step.
        workers: that took leases in it. While they are not as many as wanted, since one starts,
            drains or is lost, steps say nothing about the target and are passed over.
        target: workers wanted now.
        least, most: bounds of the target.
        rule: the thresholds.

    Returns:
        The state for the next step, and the change of the target: +1, -1 or 0.
    """
    if workers != target:
        return BalanceState(cool_down=rule.cool_down_steps), 0
    if state.cool_down:
        return BalanceState(cool_down=state.cool_down - 1), 0
    wishes = (*state.wishes, wish(waits, workers, rule))[-rule.steps :]
    change = wishes[-1]
    unanimous = len(wishes) == rule.steps and set(wishes) == {change}
    if not change or not unanimous or not least <= target + change <= most:
        return BalanceState(wishes=wishes), 0
    return BalanceState(cool_down=rule.cool_down_steps), change
