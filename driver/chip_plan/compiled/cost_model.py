"""What a TPU program would cost by the compiler's own figures. No figure here is a measured time.

The cycles of each operation are the compiler's: counted in the schedule that it dumps
(benchmarks/tpu/issue_cycles.py), or its estimate in the program's text, memory not included. The
bytes that an operation moves are read from the program's text (hlo.py). The model time of an
operation is the larger of the two at the chip's rates, and that of the program their sum, as if
nothing overlapped:

    t = max(cycles / clock, bytes / bandwidth)

The bandwidth is the published one. The clock is that at which the matrix units make the published
rate of bfloat16 products: of a v6e 1.75 GHz with two units of 256 x 256 for 918 TFLOP/s. Set
against programs that were timed on a real v6e (logits losses and a language-model head, XLA and
Pallas), the real times were 1.35 to 1.5 times the model's with counted cycles, and more where XLA
made a scatter or a relayout loop. The model ranks variants and finds regressions.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from driver.chip_plan.chips import V6E, ChipKind
from driver.chip_plan.compiled.hlo import Module, OpTraffic

WORTH_BYTES = 2**20
"""An operation that moves less takes under a microsecond: its missing cycles are no gap."""
MOST_CYCLES = 2**53
"""XLA writes the largest integer where it has no estimate."""
_ESTIMATED = re.compile(r'"estimated_cycles":"(\d+)"')
_FLOPS = re.compile(r'"flops":"(\d+)"')


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


def program_cost(
    ops: Iterable[OpTraffic], cycles: dict[str, int], chip: ChipKind = V6E
) -> ProgramCost:
    """Combines what operations move with the cycles they take.

    Args:
        ops: with the executions of each, those of loop bodies included.
        cycles: of one execution, by the operation's name.
        chip: whose rates they are.
    """
    costs = []
    for op in ops:
        each = cycles.get(op.name)
        seconds = max((each or 0) / chip.clock_hz, op.bytes / chip.bytes_per_s) * op.times
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


def stated_cycles(module: Module, chip: ChipKind) -> tuple[dict[str, int], tuple[str, ...]]:
    """Cycles that the program's text states, and the kernels that state none.

    XLA writes its estimate beside most of its operations; a kernel may state its floating-point
    operations, which are taken at the published rate.

    Returns:
        Cycles of one execution by the operation's name, and names of kernels without any.
    """
    found, unknown = {}, []
    for computation in module.computations.values():
        for op in computation.values():
            estimated = _ESTIMATED.search(op.attributes)
            if estimated and int(estimated[1]) < MOST_CYCLES:
                found[op.name] = int(estimated[1])
            elif 'custom_call_target="tpu_custom_call"' in op.attributes:
                flops = _FLOPS.search(op.attributes)
                if flops:
                    found[op.name] = round(int(flops[1]) * chip.clock_hz / chip.flops_per_s)
                else:
                    unknown.append(op.name.partition(".")[0])
    return found, tuple(dict.fromkeys(unknown))
