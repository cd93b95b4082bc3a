"""Which fault hits when: a pure function of a seed.

Faults come one at a time. Each is armed when a step is closed, and the next one only after the run
has recovered, that is, has closed another step.
"""

import dataclasses
import enum
import random
from collections.abc import Sequence

FIRST_STEP = 2
"""By then everything was compiled and published once."""
STALLS_S = (2.0, 6.0)
"""Shortest and longest time for which a process is stopped or slowed down."""
PAUSE_S = 75.0
"""How long a process is paused: longer than the driver takes a silent one for lost."""


class FaultKind(enum.Enum):
    """What goes wrong; the value is its name in reports."""

    WORKER_KILLED_DECODING = "worker killed while decoding"
    WORKER_KILLED_RECEIVING = "worker killed while receiving weights"
    WORKER_KILLED_PUSHING = "worker killed while pushing"
    LEARNER_KILLED_UPDATING = "learner killed while updating"
    LEARNER_KILLED_PUBLISHING = "learner killed while publishing"
    LEARNER_KILLED_CHECKPOINTING = "learner killed while checkpointing"
    DRIVER_KILLED = "driver killed, resubmitted"
    DRIVER_TERMINATED = "driver terminated, resubmitted"
    WORKER_SLOW = "worker ten times slower"
    WORKER_STALLED = "worker's connections stalled"
    LEARNER_STALLED = "learner's connections stalled"
    WEIGHTS_CUT = "weights cut in mid-stream"
    WEIGHTS_CORRUPT = "weights corrupted in mid-stream"
    DISK_FULL = "disk full during a checkpoint"
    REWARD_KILLED = "reward process killed"
    REWARD_STALLED = "reward process hung"
    SCALED_UP = "one worker more"
    SCALED_DOWN = "one worker less"
    SPOOL_TORN = "power lost, tail of the spool torn"
    RETENTION_BUSY = "old checkpoints busy"
    SCORER_HOSTILE = "scorer forks, prints, kills its parent"
    DRIVER_PAUSED = "driver paused for 75 s"
    WORKER_PAUSED = "worker paused for 75 s"
    LEARNER_PAUSED = "learner paused for 75 s"
    WORKER_OUT_OF_MEMORY = "worker ended for lack of memory"
    WORKER_HOST_LOST = "a worker's host lost, another joins"
    LEARNER_HOST_LOST = "the learner's host lost, another joins"
    WORKER_KILLED_WAITING = "worker killed between turns"
    LEARNER_KILLED_WAITING = "learner killed while episodes are open"
    ENVIRONMENT_KILLED = "environment process killed in a step"
    ENVIRONMENT_STOPPED = "environment process hung"
    ENVIRONMENT_HUNG = "environment hangs in a step"


IN_EPISODES = (
    FaultKind.WORKER_KILLED_WAITING,
    FaultKind.LEARNER_KILLED_WAITING,
    FaultKind.ENVIRONMENT_KILLED,
    FaultKind.ENVIRONMENT_STOPPED,
    FaultKind.ENVIRONMENT_HUNG,
)
"""Kinds that hit episodes of several turns, while an environment is at a step."""
OF_COMPLETIONS = tuple(kind for kind in FaultKind if kind not in IN_EPISODES)
"""Kinds that hit completions of one turn."""

POINTS: dict[FaultKind, tuple[str, str]] = {
    FaultKind.WORKER_KILLED_DECODING: ("worker.decode", "kill"),
    FaultKind.WORKER_KILLED_RECEIVING: ("worker.receive", "kill"),
    FaultKind.WORKER_KILLED_PUSHING: ("worker.push", "kill"),
    FaultKind.LEARNER_KILLED_UPDATING: ("learner.update", "kill"),
    FaultKind.LEARNER_KILLED_PUBLISHING: ("learner.publish", "kill"),
    FaultKind.LEARNER_KILLED_CHECKPOINTING: ("learner.checkpoint", "kill"),
    FaultKind.WEIGHTS_CUT: ("weights.serve", "raise the stream was cut by a fault"),
    FaultKind.WEIGHTS_CORRUPT: ("weights.serve", "corrupt"),
    FaultKind.DISK_FULL: ("learner.checkpoint", "enospc"),
    FaultKind.RETENTION_BUSY: ("learner.retention", "ebusy"),
}
"""Kinds that are made by a failpoint (`services/process/failpoints.py`), and its action."""

DRAWS = 1000
"""Largest number of attempts to draw a schedule that fits."""

AT_CHECKPOINTS = (
    FaultKind.LEARNER_KILLED_CHECKPOINTING,
    FaultKind.DISK_FULL,
    FaultKind.RETENTION_BUSY,
)
SKIPPING = (
    FaultKind.WORKER_KILLED_DECODING,
    FaultKind.WORKER_KILLED_PUSHING,
    FaultKind.LEARNER_KILLED_UPDATING,
)
"""Kinds whose failpoint is reached several times a step, so that some arrivals may be skipped."""

PAUSES = (FaultKind.DRIVER_PAUSED, FaultKind.WORKER_PAUSED, FaultKind.LEARNER_PAUSED)
HOST_LOSSES = (FaultKind.WORKER_HOST_LOST, FaultKind.LEARNER_HOST_LOST)

LASTING = (
    *PAUSES,
    FaultKind.WORKER_SLOW,
    FaultKind.WORKER_STALLED,
    FaultKind.LEARNER_STALLED,
    FaultKind.REWARD_STALLED,
    FaultKind.SCALED_UP,
    FaultKind.SCALED_DOWN,
)
"""Kinds that last for a while, in which steps may be closed."""

BESIDE = (FaultKind.LEARNER_KILLED_PUBLISHING, FaultKind.RETENTION_BUSY)
"""Kinds that may leave the current step undisturbed: the run has recovered when the step after it
is closed."""

SHORT = (
    FaultKind.WORKER_KILLED_PUSHING,
    FaultKind.LEARNER_KILLED_UPDATING,
    FaultKind.DRIVER_KILLED,
    FaultKind.WEIGHTS_CORRUPT,
    FaultKind.WORKER_KILLED_WAITING,
    FaultKind.ENVIRONMENT_KILLED,
)
"""Kinds of the short form, whose run is one of episodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a run."""

    number: int
    """From 1."""
    step: int
    """Armed when this step is closed, or as soon after as the run has recovered."""
    kind: FaultKind
    skip: int = 0
    """Arrivals at the failpoint that pass before it fires."""
    seconds: float = 0.0
    """How long a stall lasts."""
    choice: float = 0.0
    """In [0, 1): which of the processes is hit, where several could be."""

    @property
    def action(self) -> str:
        """What its failpoint is armed with."""
        _, action = POINTS[self.kind]
        return f"skip {self.skip} then {action}" if self.skip else action


def draw_faults(
    seed: int,
    count: int,
    *,
    steps: int,
    every_steps: int,
    kinds: Sequence[FaultKind] = tuple(FaultKind),
) -> tuple[Fault, ...]:
    """Draws faults for one run: every kind equally often, as far as the count allows.

    Args:
        seed: the same faults for the same arguments.
        count: of faults.
        steps: of the run.
        every_steps: between two checkpoints.
        kinds: drawn from.

    Returns:
        In the order of their steps.

    Raises:
        ValueError: if the run is too short for this number of faults.
    """
    chance = random.Random(seed)
    for _ in range(DRAWS):
        rounds = [chance.sample(kinds, len(kinds)) for _ in range(-(-count // len(kinds)))]
        drawn = [kind for one in rounds for kind in one][:count]
        chance.shuffle(drawn)
        at = _spread(chance, count, steps)
        if count and recovered_by(at, drawn, every_steps) < steps:
            break
    else:
        raise ValueError(
            f"{count} faults do not fit into {steps} steps with a checkpoint every {every_steps}: "
            "give at least 1 and at most about a third of the steps"
        )
    return tuple(
        Fault(
            number=number,
            step=step,
            kind=kind,
            skip=chance.randrange(3) if kind in SKIPPING else 0,
            seconds=PAUSE_S if kind in PAUSES else round(chance.uniform(*STALLS_S), 1),
            choice=chance.random(),
        )
        for number, (step, kind) in enumerate(zip(at, drawn, strict=True), start=1)
    )


def recovered_by(at: Sequence[int], kinds: Sequence[FaultKind], every_steps: int) -> int:
    """The step by which a run has recovered from the last fault, in the worst case.

    Args:
        at: steps at which faults of these kinds are armed.
        kinds: as many.
        every_steps: between two checkpoints.
    """
    free = 0
    for step, kind in zip(at, kinds, strict=True):
        armed = max(step, free)
        if kind in AT_CHECKPOINTS:
            # A checkpoint that is being written now may end before it reaches the point.
            hit = (armed // every_steps + 1) * every_steps
        elif kind in LASTING or kind in BESIDE:
            hit = armed + 2
        else:
            hit = armed + 1
        free = hit + 1
    return free


def _spread(chance: random.Random, count: int, steps: int) -> list[int]:
    """Steps at even distances, each moved by chance inside its own."""
    width = (steps - 1 - FIRST_STEP) / max(1, count)
    return [FIRST_STEP + int((index + chance.random()) * width) for index in range(count)]
