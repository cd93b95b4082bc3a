"""What a compiled program sends over the wires between chips.

Bytes are those that one chip sends, by the algorithm that goes around a ring of the n chips of a
group, which moves the least: of an all-gather and a reduce-scatter (n - 1) / n of the whole array,
of an all-reduce twice that, of an all-to-all (n - 1) / n of a chip's part, of a permutation all of
it. Loops count as often as they run where the text says so, and once elsewhere; of a condition
every branch counts.
"""

import math
import re
from typing import NamedTuple

from driver.chip_plan.compiled.hlo import (
    ARRAY,
    CALLS,
    Computation,
    Module,
    Op,
    elements_bytes,
    trip_count,
)

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_TAKEN = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
"""An axis of the mesh or, as `'x':(2)4`, four of its places that have two before them."""
_EVERYONE = "replica_groups={}"


class WireTraffic(NamedTuple):
    """One kind of collective in one program."""

    kind: str
    times: int
    wire_bytes: int
    """Sent by one chip in one run of the program."""


def wire_traffic(module: Module) -> tuple[WireTraffic, ...]:
    """What each kind of collective sends, the most first; none on one chip."""
    times: dict[str, int] = dict.fromkeys(KINDS, 0)
    sent: dict[str, int] = dict.fromkeys(KINDS, 0)
    _walk(module, module.entry, 1, times, sent)
    found = [WireTraffic(kind, times[kind], sent[kind]) for kind in KINDS if sent[kind]]
    return tuple(sorted(found, key=lambda one: -one.wire_bytes))


def sent_bytes(kind: str, group: int, whole_bytes: int) -> int:
    """Bytes that one chip sends.

    Args:
        group: chips that take part.
        whole_bytes: of the array that is whole: an all-gather's result, the operand of the others.
    """
    if kind == "collective-permute":
        return whole_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * whole_bytes * (group - 1) // group


def group_size(op: Op, everyone: int) -> int:
    """Chips of a collective's group.

    Args:
        everyone: chips of the program, for one that names no group.

    Raises:
        ValueError: if its groups are written in a way that is not known.
    """
    if listed := _LISTED.search(op.attributes):
        return listed[1].count(",") + 1
    if counted := _COUNTED.search(op.attributes):
        return int(counted[2])
    if mesh := _MESH.search(op.attributes):
        sizes = dict(_AXIS.findall(mesh[1]))
        return math.prod(int(part or sizes[name]) for name, part in _TAKEN.findall(mesh[2]))
    if "replica_groups=" in op.attributes and _EVERYONE not in op.attributes:
        raise ValueError(f"{op.opcode} {op.name} has groups of an unknown form: {op.attributes}")
    return everyone


def _walk(
    module: Module, name: str, rounds: int, times: dict[str, int], sent: dict[str, int]
) -> None:
    computation = module.computations[name]
    scatters = _reduces_and_scatters(computation)
    for op in computation.values():
        kind = op.opcode.removesuffix("-start")
        if op.opcode == "while":
            inner = rounds * (trip_count(module, computation, op) or 1)
            _walk(module, op.called("body"), inner, times, sent)
        elif op.opcode in CALLS:
            _walk(module, op.called(CALLS[op.opcode]), rounds, times, sent)
        elif op.opcode == "fusion":
            _walk(module, op.called("calls"), rounds, times, sent)
        elif op.opcode == "conditional":
            for branch in _branches(op):
                _walk(module, branch, rounds, times, sent)
        elif kind in KINDS:
            kind = "reduce-scatter" if scatters and kind == "all-reduce" else kind
            whole = sum(_type_bytes(computation[each].type) for each in op.operands)
            if kind == "all-gather":
                # The type of the asynchronous one has its operands beside its results.
                given = whole if op.opcode.endswith("-start") else 0
                whole = _type_bytes(op.type) - given
            times[kind] += rounds
            sent[kind] += rounds * sent_bytes(kind, group_size(op, module.chips), whole)


def _reduces_and_scatters(computation: Computation) -> bool:
    """Whether it is an all-reduce whose result is cut at once, which a TPU does in one go."""
    opcodes = [op.opcode for op in computation.values()]
    root = next(op for op in computation.values() if op.is_root)
    return "all-reduce" in opcodes and root.opcode == "dynamic-slice"


def _branches(op: Op) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", op.attributes)
    if listed:
        return re.findall(r"%([\w.\-]+)", listed[1])
    return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", op.attributes)


def _type_bytes(type_text: str) -> int:
    """Bytes of all arrays of a type, wherever they lie."""
    return sum(
        elements_bytes(dtype, math.prod(int(each) for each in dims.split(",") if each))
        for dtype, dims, _ in ARRAY.findall(type_text)
    )
