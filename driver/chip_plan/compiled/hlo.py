"""Reads the text of a compiled TPU program: its operations, and the bytes each moves.

The traffic of an operation is what it reads of its operands and writes of its outputs in the
chip's main memory, each once: a buffer in another memory space (`S(1)` of a layout is the fast
memory on the chip) moves nothing. A slice reads what it returns; an update in place writes the
update, and a fusion around either is treated so too. What a matrix product reads again because it
works in tiles is not seen, except in a custom call, which may state more bytes than its arrays
have. Sizes are those of the shapes, without the padding of their layouts.
"""

import dataclasses
import math
import re
from collections.abc import Collection
from typing import NamedTuple

BITS = {"pred": 8, "bf16": 16, "token": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2}
"""Of the types whose name does not end in their width."""
ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%([\w.\-]+)")
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
}
"""Operations that move nothing: they name what is there."""
CALLS = {"call": "to_apply", "call-start": "to_apply", "async-start": "calls"}
"""Operations that are the computation they call, and the role it has."""
VIEWS = {"bitcast", "reshape", "convert", "copy"}
"""Inside a fusion: the same elements under another name."""
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""Operations that change their first operand in place, and which operand has the new values."""
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_COPIES = re.compile(r"\b(?:replica_count|num_partitions)=(\d+)")
STATED_BYTES = re.compile(r'"bytes_accessed":"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction."""

    name: str
    type: str
    """Of its result, with layouts."""
    opcode: str
    operands: tuple[str, ...]
    literal: str
    """What stands between the parentheses: of a constant its value, of a parameter its number."""
    attributes: str
    is_root: bool

    def called(self, role: str) -> str:
        """Name of the computation in that role (`calls`, `body`, ..)."""
        found = re.search(rf"\b{role}=%([\w.\-]+)", self.attributes)
        if found is None:
            raise ValueError(f"{self.opcode} {self.name} has no {role}")
        return found[1]


Computation = dict[str, Op]


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a program by name."""

    computations: dict[str, Computation]
    entry: str
    chips: int = 1
    """That run it together."""

    def entered_at(self, entry: str) -> "Module":
        """One computation of it, with all that it calls."""
        return dataclasses.replace(self, entry=entry)

    def arguments(self) -> list[Op]:
        """The parameters of the program, in order."""
        return _parameters(self.computations[self.entry])


class OpTraffic(NamedTuple):
    """What one operation of the program moves."""

    name: str
    opcode: str
    bytes: int
    """In one execution; 0 for one that works in fast memory alone."""
    times: int
    """Executions in a run of the program."""


class Traffic(NamedTuple):
    """What a program moves."""

    ops: list[OpTraffic]
    uncounted_loops: list[str]
    """Loops whose number of rounds is not in the text; one round of each is counted."""

    @property
    def bytes(self) -> int:
        """Of all executions together."""
        return sum(op.bytes * op.times for op in self.ops)


def parse_program(text: str) -> Module:
    """The computations of a compiled program's text.

    Raises:
        ValueError: if there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current, chips = None, None, 1
    for line in text.splitlines():
        if line.startswith("HloModule "):
            chips = math.prod(map(int, _COPIES.findall(line)))
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if header:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}") and not line.startswith("}}"):  # two end an attribute
            current = None
        elif current is not None:
            op = _parse_op(line)
            if op is not None:
                current[op.name] = op
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not a compiled program")
    return Module(computations, entry, chips)


def traffic(module: Module) -> Traffic:
    """Every operation that does something, those of loop bodies as often as they run."""
    found = Traffic([], [])
    _walk(module, module.entry, 1, found)
    return found


def ordinary_ops(module: Module) -> list[OpTraffic]:
    """The operations of `traffic` as a run does them as a rule: a `slice-start` moves what it
    fetches, and branches, which are of rows that ask for top-k or top-p, do not run.
    """
    by_name = {name: op for each in module.computations.values() for name, op in each.items()}
    return [
        op._replace(bytes=fetched_bytes(by_name[op.name])) if op.opcode == "slice-start" else op
        for op in traffic(module).ops
        if op.opcode != "conditional"
    ]


def longest_loop(module: Module, *, only: Collection[str] | None = None) -> str | None:
    """The body of the loop that moves the most in a round; None where there is no loop.

    Args:
        only: names of the loops to choose from; None takes all.
    """
    bodies = [
        op.called("body")
        for computation in module.computations.values()
        for op in computation.values()
        if op.opcode == "while" and (only is None or op.name in only)
    ]
    return max(bodies, key=lambda body: traffic(module.entered_at(body)).bytes, default=None)


def array_bytes(type_text: str) -> int:
    """Bytes in main memory of a type, which may be a tuple."""
    return sum(
        elements_bytes(dtype, _elements(dims))
        for dtype, dims, layout in ARRAY.findall(type_text)
        if _in_main_memory(layout)
    )


def fetched_bytes(op: Op) -> int:
    """Of a `slice-start`, which fetches beside other work: what it fetches, not what it is a part
    of.
    """
    match = list(ARRAY.finditer(op.type))[1]
    in_main_memory = re.sub(r"S\(1\)", "", match[0])
    return array_bytes(in_main_memory) + array_bytes(match[0])


def _walk(module: Module, name: str, times: int, found: Traffic) -> None:
    computation = module.computations[name]
    for op in computation.values():
        if op.opcode == "while":
            rounds = trip_count(module, computation, op)
            if rounds is None:
                found.uncounted_loops.append(op.name)
            _walk(module, op.called("body"), times * (rounds or 1), found)
        elif op.opcode in CALLS:
            _walk(module, op.called(CALLS[op.opcode]), times, found)
        elif op.opcode not in FREE and not op.opcode.endswith("-done"):
            moved = op_bytes(module, computation, op)
            found.ops.append(OpTraffic(op.name, op.opcode, moved, times))


def op_bytes(module: Module, computation: Computation, op: Op) -> int:
    """Bytes that one execution of an operation moves in main memory."""
    operand_types = [computation[name].type for name in op.operands if name in computation]
    if op.opcode == "copy-start":  # returns the destination, the source and a semaphore
        return sum(
            elements_bytes(dtype, _elements(dims))
            for dtype, dims, layout in ARRAY.findall(op.type)[:2]
            if _in_main_memory(layout)
        )
    if op.opcode == "fusion":
        fused = op.called("calls")
        return _fusion_reads(module, fused, operand_types) + _fusion_writes(module, fused, op)
    if op.opcode in ("dynamic-slice", "slice", "gather"):
        return array_bytes(op.type) + _part_bytes(operand_types[0], op.type)
    if op.opcode in UPDATES and not op.type.startswith("("):
        new = operand_types[UPDATES[op.opcode]]
        return array_bytes(new) + _part_bytes(op.type, new)
    moved = array_bytes(op.type) + sum(map(array_bytes, operand_types))
    if op.opcode == "custom-call":
        if 'custom_call_target="tpu_custom_call"' not in op.attributes and not operand_types:
            return 0  # AllocateBuffer and the like
        stated = STATED_BYTES.search(op.attributes)
        return max(moved, int(stated[1]) if stated else 0)
    return moved


def trip_count(module: Module, computation: Computation, loop: Op) -> int | None:
    """Rounds of a while loop that counts up to a constant; None where that cannot be seen."""
    known = TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations[loop.called("condition")]
    body = module.computations[loop.called("body")]
    start = computation.get(loop.operands[0])
    test = _root(condition)
    if test.opcode != "compare" or "direction=LT" not in test.attributes or start is None:
        return None
    counter = _tuple_index(condition[test.operands[0]])
    new = _root(body)
    if counter is None or new.opcode != "tuple" or start.opcode != "tuple":
        return None
    bound = _constant(condition, test.operands[1])
    bound_index = _tuple_index(condition[test.operands[1]])
    if bound is None and bound_index is not None:
        bound = _constant(computation, start.operands[bound_index])
    first = _constant(computation, start.operands[counter])
    step_op = body[new.operands[counter]]
    step = _constant(body, step_op.operands[-1]) if step_op.opcode == "add" else None
    if bound is None or first is None or not step:
        return None
    return max(0, -(-(bound - first) // step))


def _fusion_reads(module: Module, name: str, operand_types: list[str]) -> int:
    computation = module.computations[name]
    return sum(
        _part_bytes(given, None, _elements_read(module, computation, parameter))
        for given, parameter in zip(operand_types, _parameters(computation), strict=True)
    )


def _elements_read(module: Module, computation: Computation, array: Op) -> int:
    """Elements of an array that a fused computation reads, at most all of them."""
    total = _type_elements(array.type)
    read = 0
    for user in computation.values():
        for place, operand in enumerate(user.operands):
            if operand != array.name:
                continue
            if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
                read += _type_elements(user.type)
            elif user.opcode in VIEWS:
                read += _elements_read(module, computation, user) if not user.is_root else total
            elif user.opcode == "fusion":
                inner = module.computations[user.called("calls")]
                read += _elements_read(module, inner, _parameters(inner)[place])
            elif user.opcode not in UPDATES or place != 0:
                read += total
    return min(read, total)


def _fusion_writes(module: Module, name: str, op: Op) -> int:
    computation = module.computations[name]
    root = _root(computation)
    parts = [computation[each] for each in root.operands] if root.opcode == "tuple" else [root]
    outputs = ARRAY.findall(op.type)
    if len(parts) != len(outputs):
        return array_bytes(op.type)
    return sum(
        elements_bytes(dtype, _elements_written(module, computation, part))
        for part, (dtype, _, layout) in zip(parts, outputs, strict=True)
        if _in_main_memory(layout)
    )


def _elements_written(module: Module, computation: Computation, part: Op) -> int:
    while part.opcode in VIEWS and part.operands[0] in computation:
        part = computation[part.operands[0]]
    if part.opcode in UPDATES:
        return _type_elements(computation[part.operands[UPDATES[part.opcode]]].type)
    if part.opcode == "fusion" and not part.type.startswith("("):
        inner = module.computations[part.called("calls")]
        return _elements_written(module, inner, _root(inner))
    return _type_elements(part.type)


def _part_bytes(whole: str, part: str | None, elements: int = 0) -> int:
    """Bytes of as many elements as `part` has, in an array of type `whole`."""
    dtype, _, layout = ARRAY.findall(whole)[0] if ARRAY.search(whole) else ("token", "", "")
    count = elements if part is None else _type_elements(part)
    return elements_bytes(dtype, count) if _in_main_memory(layout) else 0


def _type_elements(type_text: str) -> int:
    return sum(_elements(dims) for _, dims, _ in ARRAY.findall(type_text))


def _elements(dims: str) -> int:
    return math.prod(int(each) for each in dims.split(",") if each)


def elements_bytes(dtype: str, elements: int) -> int:
    """Bytes of a number of elements of a type."""
    bits = BITS.get(dtype)
    if bits is None:
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 0
    return elements * bits // 8


def _in_main_memory(layout: str) -> bool:
    space = re.search(r"S\((\d+)\)", layout)
    return space is None or space[1] == "0"


def _root(computation: Computation) -> Op:
    return next(op for op in computation.values() if op.is_root)


def _parameters(computation: Computation) -> list[Op]:
    found = [op for op in computation.values() if op.opcode == "parameter"]
    return sorted(found, key=lambda op: int(op.literal))


def _tuple_index(op: Op) -> int | None:
    found = re.search(r"\bindex=(\d+)", op.attributes)
    return int(found[1]) if op.opcode == "get-tuple-element" and found else None


def _constant(computation: Computation, name: str) -> int | None:
    op = computation[name]
    while op.opcode in VIEWS:
        op = computation[op.operands[0]]
    is_number = op.opcode == "constant" and re.fullmatch(r"-?\d+", op.literal)
    return int(op.literal) if is_number else None


def _parse_op(line: str) -> Op | None:
    head = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    return Op(
        name=head[2],
        type=re.sub(r"/\*.*?\*/", "", type_text),
        opcode=rest[:opening],
        operands=tuple(NAME.findall(inside)),
        literal=inside,
        attributes=rest[closing + 1 :],
        is_root=bool(head[1]),
    )


def _closing(text: str, opening: int) -> int:
    """Place of the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"unbalanced parentheses: {text[:200]}")
