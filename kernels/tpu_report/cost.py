"""What a TPU program would cost by the compiler's own figures. No figure here is a measured time.

Of each operation libtpu's static evaluator gives the cycles that its schedule issues, loops of the
kernel included, memory not; the program's text gives the bytes it moves (hlo.py). The model
time of an operation is the larger of the two at a v6e's rates, and that of the program their sum,
as if nothing overlapped:

    t = max(cycles / 1.75 GHz, bytes / 1.64 TB/s)

1.64 TB/s is the published bandwidth. 1.75 GHz is the clock at which two 256 x 256 matrix units
make the published 918 TFLOP/s, and by which the evaluator gives a 4096^3 product 278,953 cycles
against an ideal of 262,144. Set against programs that were timed on a real v6e (logits losses and
a language-model head, XLA and Pallas), the real times were 1.35 to 1.5 times the model's, and more
where XLA made a scatter or a relayout loop. The model ranks variants and finds regressions.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kernels.tpu_report.hlo import OpTraffic

CLOCK_HZ = 1.75e9
BYTES_PER_S = 1.64e12
SENTINEL_CYCLES = 2**62
"""The evaluator writes 2^63 where it gives up; nothing true comes near."""
ESTIMATE = re.compile(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)')
WORTH_BYTES = 2**20
"""An operation that moves less takes under a microsecond: its missing cycles are no gap."""


class OpCost(NamedTuple):
    """One operation, in all its executions."""

    name: str
    opcode: str
    times: int
    cycles: int | None
    """None where the evaluator gave none: the time is then that of the bytes alone."""
    bytes: int
    ms: float


class Cost(NamedTuple):
    """A program by the model."""

    ops: list[OpCost]
    """Dearest first."""
    cycles: int
    ms: float
    without_cycles: list[str]
    """Operations that matter and have none, because the evaluator stopped half-way. Asynchronous
    copies have none by nature."""


def read_cycles(profiles: Iterable[str]) -> dict[str, int]:
    """Cycles of one execution of each operation, from the evaluator's text protos."""
    found = {}
    for text in profiles:
        for name, cycles in ESTIMATE.findall(text):
            if int(cycles) < SENTINEL_CYCLES:
                found[name] = int(cycles)
    return found


def extrapolate(parts: Sequence[tuple[int, dict[str, int]]], size: int) -> dict[str, int]:
    """Cycles at a size from those at one or two smaller ones.

    From one they are taken in proportion, fixed costs included. From two they follow the line
    through both, which is that of a kernel that walks equal tiles. An operation that not all have
    is left out.
    """
    if len(parts) == 1:
        [(small, cycles)] = parts
        return {name: round(each * size / small) for name, each in cycles.items()}
    (first, low), (second, high) = parts
    steps = (size - first) / (second - first)
    return {
        name: round(low[name] + (high[name] - low[name]) * steps) for name in low if name in high
    }


def model(ops: Iterable[OpTraffic], cycles: dict[str, int]) -> Cost:
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
    return Cost(
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
