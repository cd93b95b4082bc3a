"""Clocks and memory of compiled programs; knows nothing of what they compute."""

import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

MEMORY_STATS = ("bytes_in_use", "peak_bytes_in_use", "bytes_reserved", "peak_bytes_reserved")
PACKAGES = ("jax", "jaxlib", "libtpu")
INTERPRETED = "pallas is interpreted here: exact, and no measure of its speed"


class Compilation(NamedTuple):
    """A program made for one device."""

    compiled: Any
    trace_s: float
    compile_s: float


def compile_program(jitted: Any, abstract_args: Sequence[Any]) -> Compilation:
    """Compiles for shapes alone: nothing is allocated."""
    start = time.perf_counter()
    lowered = jitted.lower(*abstract_args)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return Compilation(compiled, traced - start, time.perf_counter() - traced)


def program_bytes(compiled: Any) -> int:
    """What a program needs while it runs, its arguments and results included."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def compiler_report(compiled: Any) -> dict[str, Any]:
    """What the compiler says of a program, under plain names; sizes in bytes."""
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    layouts = lambda formats: [str(each.layout) for each in jax.tree.leaves(formats)]
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "bytes_accessed": cost.get("bytes accessed"),
        "flops": cost.get("flops"),
        "input_layouts": layouts(compiled.input_formats),
        "output_layouts": layouts(compiled.output_formats),
    }


def memory_in_use(device: jax.Device) -> dict[str, int | None] | None:
    """The allocator's own counts, in bytes; None where it keeps none. Peaks are the process's."""
    stats = device.memory_stats()
    return {name: stats.get(name) for name in MEMORY_STATS} if stats else None


def time_interleaved(
    steps: Sequence[Callable[[], None]],
    *,
    warmup: int,
    iters: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Runs the steps in turn (A B A B ..), so that a drift of the machine meets all alike.

    Args:
        steps: each returns when its device work is done.

    Returns:
        Seconds of each of the `iters` rounds after the warm-up, per step.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    for round_number in range(warmup + iters):
        for step, own in zip(steps, seconds, strict=True):
            start = clock()
            step()
            if round_number >= warmup:
                own.append(clock() - start)
    return seconds


def step_times(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 90th percentile in ms; None each where nothing was timed."""
    if not seconds:
        return {"avg_step_ms": None, "p50_ms": None, "p90_ms": None}
    p50, p90 = (1e3 * float(each) for each in np.percentile(seconds, [50, 90]))
    return {"avg_step_ms": 1e3 * float(np.mean(seconds)), "p50_ms": p50, "p90_ms": p90}


def versions() -> dict[str, str | None]:
    """Of what decides about a measurement; None for what is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def plain(value: Any) -> Any:
    """The value as strict JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
