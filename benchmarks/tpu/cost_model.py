"""What a TPU program would cost by the compiler's own figures. No figure here is a measured time.

The schedule of each operation gives its issue cycles, memory not included (issue_cycles.py), and
the program's text the bytes that it moves (hlo.py). The model time of an operation is the larger of
the two at a v6e's rates, and that of the program their sum, as if nothing overlapped:

    t = max(cycles / 1.75 GHz, bytes / 1.64 TB/s)

1.64 TB/s is the published bandwidth. 1.75 GHz is the clock at which two 256 x 256 matrix units
make the published 918 TFLOP/s. Set against programs that were timed on a real v6e (logits losses
and a language-model head, XLA and Pallas), the real times were 1.35 to 1.5 times the model's, and
more where XLA made a scatter or a relayout loop. The model ranks variants and finds regressions.
"""

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.tpu.hlo import OpTraffic

CLOCK_HZ = 1.75e9
BYTES_PER_S = 1.64e12
WORTH_BYTES = 2**20
"""An operation that moves less takes under a microsecond: its missing cycles are no gap."""


class OpCost(NamedTuple):
    """One operation, in all its executions."""

    name: str
    opcode: str
    times: int
    cycles: int | None
    """None where it has no schedule of its own: the time is then that of the bytes alone."""
    bytes: int
    ms: float


class ProgramCost(NamedTuple):
    """A program by the model."""

    ops: list[OpCost]
    """Dearest first."""
    cycles: int
    ms: float
    without_cycles: list[str]
    """Operations that matter and have none; asynchronous copies, which have none by nature, are
    not among them."""


def program_cost(ops: Iterable[OpTraffic], cycles: dict[str, int]) -> ProgramCost:
    """Combines what operations move with the cycles they take.

    Args:
        ops: with the executions of each, those of loop bodies included.
        cycles: of one execution, by the operation's name.
    """
    costs = []
    for op in ops:
        each = cycles.get(op.name)
        seconds = max((each or 0) / CLOCK_HZ, op.bytes / BYTES_PER_S) * op.times
        total = None if each is None else each * op.times
        costs.append(
            OpCost(op.name, op.opcode, op.times, total, op.bytes * op.times, seconds * 1e3)
        )
    costs.sort(key=lambda cost: -cost.ms)
    return ProgramCost(
        ops=costs,
        cycles=sum(cost.cycles or 0 for cost in costs),
        ms=sum(cost.ms for cost in costs),
        without_cycles=[
            cost.name
            for cost in costs
            if cost.cycles is None
            and cost.bytes >= WORTH_BYTES
            and not cost.opcode.endswith("-start")
        ],
    )
