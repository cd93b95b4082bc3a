"""Compiled programs: how long compiling took, and what the compiler says they need."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import jax

MEMORY_STATS = ("bytes_in_use", "peak_bytes_in_use", "bytes_reserved", "peak_bytes_reserved")


class TimedCompilation(NamedTuple):
    """A program made for one device."""

    compiled: Any
    trace_s: float
    compile_s: float


def compile_program(jitted: Any, abstract_args: Sequence[Any]) -> TimedCompilation:
    """Compiles for shapes alone: nothing is allocated."""
    start = time.perf_counter()
    lowered = jitted.lower(*abstract_args)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return TimedCompilation(compiled, traced - start, time.perf_counter() - traced)


class ProgramSizes(TypedDict):
    """What the compiler says a program needs, in bytes of one device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of outputs in donated arguments, which are counted in both."""
    temp_bytes: int
    """Size of the heap: at least what is alive at once."""
    peak_bytes: int
    """Arguments, outputs and temporaries at the moment when they are the most."""


def program_sizes(compiled: Any) -> ProgramSizes:
    """The sizes of a compiled program."""
    memory = compiled.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
    }


def whole_bytes(sizes: ProgramSizes) -> int:
    """Upper bound from `program_sizes`: arguments, results and the whole heap at once."""
    kept = sizes["argument_bytes"] + sizes["output_bytes"] - sizes["alias_bytes"]
    return kept + sizes["temp_bytes"]


def accessed_bytes(compiled: Any) -> int:
    """Bytes read or written by one run, as XLA counts them: the body of a loop once."""
    return int((compiled.cost_analysis() or {}).get("bytes accessed", 0))


def compiler_report(compiled: Any) -> dict[str, Any]:
    """Sizes in bytes, costs and layouts of a program."""
    cost = compiled.cost_analysis() or {}
    layouts = lambda formats: [str(each.layout) for each in jax.tree.leaves(formats)]
    return program_sizes(compiled) | {
        "bytes_accessed": cost.get("bytes accessed"),
        "flops": cost.get("flops"),
        "input_layouts": layouts(compiled.input_formats),
        "output_layouts": layouts(compiled.output_formats),
    }


def memory_in_use(device: jax.Device) -> dict[str, int | None] | None:
    """The allocator's own counts, in bytes; None where it keeps none. Peaks are the process's."""
    stats = device.memory_stats()
    return {name: stats.get(name) for name in MEMORY_STATS} if stats else None
