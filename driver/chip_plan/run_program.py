"""One compiled program of a run: what it takes of a chip, and what it moves.

All bytes are those of one chip.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from driver.chip_plan.chips import ChipKind
from driver.chip_plan.compiled import hlo
from driver.chip_plan.compiled.collectives import WireTraffic, wire_traffic
from driver.chip_plan.compiled.cost_model import program_cost, stated_cycles

Parts = Mapping[str, int]
"""What the arrays are -> their bytes."""
TEMPORARIES = "temporaries"
_TEMPORARIES = re.compile(r"temporaries \(([\d.]+)([KMG])\)")
_USED = re.compile(r"Used ([\d.]+)([KMG]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunProgram:
    """One compiled program, or the attempt at one."""

    role: str
    """`learner` or `worker`."""
    name: str
    compile_s: float = 0.0
    error: str = ""
    """What the compiler said where it gave up; the sizes are 0 then, or what it said they are."""
    peak_bytes: int = 0
    """Arguments, outputs and temporaries at the moment when they are the most."""
    inside: Parts = dataclasses.field(default_factory=dict)
    """Named arrays among the arguments and outputs."""
    beside: Parts = dataclasses.field(default_factory=dict)
    """Arrays that stay on the chip during the run and are none of the program's."""
    wires: tuple[WireTraffic, ...] = ()
    """Of one run."""
    accessed_bytes: int = 0
    """Moved in the chip's memory by one run."""
    model_ms: float | None = None
    """Of one run by the model of cost_model.py, never measured; None where there are no rates."""
    open_loops: int = 0
    """Loops whose rounds depend on the data, of which `wires`, `accessed_bytes` and `model_ms` have
    one."""
    unknown_work: tuple[str, ...] = ()
    """Kernels that state no work: the model has the bytes of these alone."""

    @property
    def need_bytes(self) -> int:
        """Memory of a chip while this program runs."""
        return self.peak_bytes + sum(self.beside.values())

    @property
    def parts(self) -> dict[str, int]:
        """What makes up `need_bytes`, largest first, temporaries (with small inputs) last."""
        total = added(self.inside, self.beside)
        ordered = dict(sorted(total.items(), key=lambda part: -part[1]))
        rest = self.need_bytes - sum(total.values())
        return {name: count for name, count in ordered.items() if count} | {
            TEMPORARIES: max(0, rest)
        }

    def fits(self, usable_bytes: int) -> bool:
        """Whether it compiled and needs no more than this."""
        return not self.error and self.need_bytes <= usable_bytes


class PlannedProgram(NamedTuple):
    """A program that a run compiles."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    takes: Parts
    """Named arrays among its arguments, those that it donates included."""
    beside: Parts
    """As RunProgram has it."""
    makes: Parts = MappingProxyType({})
    """Named arrays that it returns in new memory."""
    rounds: int = 1
    """At most, of the loop that its data ends."""

    @property
    def inside(self) -> dict[str, int]:
        """As RunProgram has it."""
        return added(self.takes, self.makes)


class ProgramCompiler:
    """Compiles the programs of one role and reads their figures."""

    def __init__(self, role: str, kind: ChipKind | None, others: Parts):
        """Args:
        kind: of the chips; None has no rates, so that there are no model times.
        others: arrays of the other role that lie on the same chips.
        """
        self._role = role
        self._kind = kind
        self._others = others

    def compile_program(self, planned: PlannedProgram) -> RunProgram:
        """Compiles one program; the error of a compiler that refuses is in what is returned."""
        started = time.monotonic()
        given: dict[str, Any] = dict(
            role=self._role,
            name=planned.name,
            inside=planned.inside,
            beside=added(planned.beside, self._others),
        )
        try:
            compiled = planned.lower().compile()
        # XLA has a class for its errors; those of JAX and Pallas are Python's or not public.
        except Exception as error:
            seconds, text = time.monotonic() - started, str(error) or type(error).__name__
            peak = stated_peak(text, sum(planned.inside.values()))
            return RunProgram(**given, compile_s=seconds, error=text, peak_bytes=peak)
        return RunProgram(
            **given,
            compile_s=time.monotonic() - started,
            peak_bytes=self._peak_bytes(compiled, sum(planned.takes.values())),
            **self._moved(compiled, planned.rounds),
        )

    def _peak_bytes(self, compiled: jax.stages.Compiled, taken: int) -> int:
        memory: Any = compiled.memory_analysis()
        # An argument that is not read is none of the compiler's, and lies on the chip all the same.
        unread = max(0, taken - memory.argument_size_in_bytes)
        if self._kind is not None:
            return unread + memory.peak_memory_in_bytes
        # XLA for the CPU leaves temporaries, which it takes as one block, out of its peak.
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return unread + kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes

    def _moved(self, compiled: jax.stages.Compiled, rounds: int) -> dict[str, Any]:
        """What the program's text says that it moves, and the model time of that."""
        module = hlo.parse_program(str(compiled.as_text()))
        found = _figures(module, self._kind)
        uncounted = hlo.traffic(module).uncounted_loops
        loop = hlo.longest_loop(module, only=uncounted) if rounds > 1 else None
        if loop is not None:
            found = found.plus(_figures(module.entered_at(loop), self._kind), rounds)
        moved: dict[str, Any] = dict(
            wires=found.wires,
            accessed_bytes=found.accessed_bytes,
            open_loops=len(uncounted) - (loop is not None),
        )
        if self._kind is not None:
            moved |= dict(
                model_ms=found.model_ms, unknown_work=stated_cycles(module, self._kind)[1]
            )
        return moved


class _Figures(NamedTuple):
    """Of one computation with all that it calls."""

    accessed_bytes: int
    model_ms: float
    wires: tuple[WireTraffic, ...]

    def plus(self, body: "_Figures", rounds: int) -> "_Figures":
        """With all rounds of a loop, of which one is in these figures."""
        more = rounds - 1
        wires = {one.kind: one for one in self.wires}
        for kind, times, sent in body.wires:
            whole = wires[kind]
            wires[kind] = WireTraffic(
                kind, whole.times + more * times, whole.wire_bytes + more * sent
            )
        return _Figures(
            self.accessed_bytes + more * body.accessed_bytes,
            self.model_ms + more * body.model_ms,
            tuple(wires.values()),
        )


def _figures(module: hlo.Module, kind: ChipKind | None) -> _Figures:
    ops = hlo.ordinary_ops(module)
    wires = wire_traffic(module)
    accessed = sum(op.bytes * op.times for op in ops)
    if kind is None:
        return _Figures(accessed, 0.0, wires)
    cost = program_cost(ops, stated_cycles(module, kind)[0], kind)
    wire_ms = 1e3 * sum(one.wire_bytes for one in wires) / kind.wire_bytes_per_s
    return _Figures(accessed, cost.ms + wire_ms, wires)


def added(one: Parts, other: Parts) -> dict[str, int]:
    """The parts of both, those of one name together."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def stated_peak(error: str, named_bytes: int) -> int:
    """What the compiler said that a program would need, or 0 where it did not say."""
    for pattern, beside in ((_TEMPORARIES, named_bytes), (_USED, 0)):
        if found := pattern.search(error):
            return beside + round(float(found[1]) * _UNITS[found[2]])
    return 0
