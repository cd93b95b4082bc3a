"""`python -m kernels.bench attention`: packed attention, value and gradient, side by side.

Every row holds segments of one length, as far as it divides. Errors are relative to float64, of the
first segment of the first row and its first key/value head: a segment's gradient depends on nothing
outside of it.

Dimension key: that of kernels/packed_attention/reference.py.
"""

import argparse
import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float64_attention, float64_reference
from benchmarks.compiled_program import (
    compile_program,
    compiler_report,
    program_sizes,
    whole_bytes,
)
from benchmarks.float64_attention import AttentionGradients
from benchmarks.kernels.case import DTYPES, SEEDS, available_bytes, check_fits
from benchmarks.report_file import aligned, check_report_file, json_values, versions, write_report
from benchmarks.timing import step_times, time_interleaved
from kernels import choose
from kernels.packed_attention.ops import packed_attention, plan_attention

SIZES = {"batch": 1, "time": 4096, "segments": 8, "heads": 16, "kv_heads": 2, "head_size": 128}
SIZE_HELP = {
    "batch": "rows",
    "time": "tokens of each row",
    "segments": "of each row, of one length",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "head_size": "of each head",
}
CHECKED_TOKENS = 4096
"""Longest segment that is compared with float64, which makes its scores whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One problem."""

    batch: int
    time: int
    segments: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    window: int | None
    soft_cap: float | None
    seed: int

    def __post_init__(self):
        for name in SIZES:
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be at least 1, got {getattr(self, name)}")
        if self.segments > self.time:
            raise ValueError(
                f"--segments must be at most --time {self.time}, got {self.segments}: a segment "
                "has a token"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads must be a multiple of --kv-heads {self.kv_heads}, got {self.heads}"
            )
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"--seed must be at least 0 and below {SEEDS}, got {self.seed}")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the operation."""
        return {"window": self.window, "soft_cap": self.soft_cap}

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Query, key, value, segments and the cotangent of the output."""
        B, T, H, dtype = self.batch, self.time, self.head_size, jnp.dtype(self.dtype)
        query = jax.ShapeDtypeStruct((B, T, self.heads, H), dtype)
        key = jax.ShapeDtypeStruct((B, T, self.kv_heads, H), dtype)
        return query, key, key, jax.ShapeDtypeStruct((B, T), jnp.int32), query

    def arrays(self) -> tuple[jax.Array, ...]:
        """Random ones of these shapes."""
        keys = iter(jax.random.split(jax.random.key(self.seed), 4))
        row_T = np.arange(self.time) * self.segments // self.time + 1
        return tuple(
            jnp.broadcast_to(jnp.asarray(row_T, shape.dtype), shape.shape)
            if jnp.issubdtype(shape.dtype, jnp.integer)
            else jax.random.normal(next(keys), shape.shape, shape.dtype)
            for shape in self.shapes()
        )


def program(case: AttentionCase, impl: str) -> Any:
    """Jitted (query, key, value, segment, d_out) -> output and gradients."""
    attend = functools.partial(
        packed_attention, operand_dtype=case.dtype, impl=impl, **case.options
    )

    def run(query, key, value, segment, d_out):
        of = lambda query, key, value: attend(query, key, value, segment)
        out, pull = jax.vjp(of, query, key, value)
        return AttentionGradients(out, *pull(d_out))

    return jax.jit(run)


def measure(
    case: AttentionCase, choices: list[str], device: jax.Device, *, iters: int, warmup: int
) -> dict[str, Any]:
    """Compiles, checks and times the implementations in turn.

    Returns:
        `runs`, one record each, and `ratios` of their medians to the first; plain values.

    Raises:
        ValueError: if the operation refuses the case, or it does not fit the device's memory.
    """
    runs, programs = [], []
    for choice in choices:
        impl = plan_attention(choice, device.platform).impl_for(case.time)
        compilation = compile_program(program(case, impl), case.shapes())
        needed = whole_bytes(program_sizes(compilation.compiled))
        check_fits(f"{choice} at {case.time} tokens", needed, available_bytes(device))
        programs.append(compilation.compiled)
        runs.append(
            {
                "name": choice,
                "kernel": impl,
                "compile_s": compilation.compile_s,
                "compiler": compiler_report(compilation.compiled),
                "device": device.device_kind,
                "platform": device.platform,
                "versions": versions(),
            }
        )
    arrays = case.arrays()
    for run, compiled in zip(runs, programs, strict=True):
        started = time.perf_counter()
        found = jax.block_until_ready(compiled(*arrays))
        run["first_call_s"] = run["compile_s"] + time.perf_counter() - started
        run["errors"] = errors(case, arrays, found)
        print(f"{run['name']}: first call {run['first_call_s']:.2f} s", file=sys.stderr)
    steps = [functools.partial(_step, compiled, arrays) for compiled in programs]
    seconds = time_interleaved(steps, warmup=warmup, iters=iters)
    for run, own in zip(runs, seconds, strict=True):
        run |= step_times(own) | {"iters": iters, "warmup": warmup}
    ratios = {}
    if iters:
        first = np.median(seconds[0])
        ratios = {
            f"{run['name']} / {choices[0]}": float(np.median(own) / first)
            for run, own in zip(runs[1:], seconds[1:], strict=True)
        }
    return {"case": dataclasses.asdict(case), "runs": runs, "ratios": ratios}


def _step(compiled, arrays) -> None:
    jax.block_until_ready(compiled(*arrays))


def errors(
    case: AttentionCase, arrays: tuple[jax.Array, ...], found: AttentionGradients
) -> dict[str, dict[str, float]]:
    """Distances from float64 by the name of the array; none where the segment is too long."""
    tokens = -(-case.time // case.segments)
    if tokens > CHECKED_TOKENS:
        return {}
    shared = case.heads // case.kv_heads
    heads = {case.heads: slice(0, shared), case.kv_heads: slice(0, 1)}
    part = lambda array: np.asarray(array[:1, :tokens])[:, :, heads[array.shape[2]]]
    query, key, value, segment, d_out = arrays
    truth = float64_attention.value_and_gradients(
        *(part(query), part(key), part(value)),
        np.asarray(segment[:1, :tokens]),
        part(d_out),
        **case.options,
    )
    return {
        name: float64_reference.distance(part(getattr(found, name)), getattr(truth, name))._asdict()
        for name in truth._fields
    }


def run(arguments: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    fields = {
        field.name: getattr(arguments, field.name) for field in dataclasses.fields(AttentionCase)
    }
    try:
        case = AttentionCase(**fields)
        choices = arguments.compare.split(",")
        if len(set(choices)) < len(choices):
            raise ValueError(f"--compare names an implementation twice: {arguments.compare!r}")
        for name in ("iters", "warmup"):
            if getattr(arguments, name) < 0:
                raise ValueError(f"--{name} must be at least 0, got {getattr(arguments, name)}")
        check_report_file(arguments.json)
        found = measure(
            case, choices, jax.devices()[0], iters=arguments.iters, warmup=arguments.warmup
        )
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    document = json_values({"what": "attention", **found})
    write_report(document, arguments.json, table(document))
    wrong = [
        one["name"]
        for one in document["runs"]
        if any(value is None for each in one["errors"].values() for value in each.values())
    ]
    if wrong:
        print(f"bench: not finite: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def table(document: dict[str, Any]) -> list[str]:
    """The document for a person, as lines."""
    names = AttentionGradients._fields
    rows = [["", "by", "p50 ms", "p90 ms", "temp MB", *(f"{name} error" for name in names)]]
    for one in document["runs"]:
        times = [one["p50_ms"], one["p90_ms"], one["compiler"]["temp_bytes"] / 1e6]
        found = [one["errors"].get(name, {}).get("rel_l2") for name in names]
        rows.append(
            [one["name"], one["kernel"]]
            + ["-" if each is None else f"{each:.1f}" for each in times]
            + ["-" if each is None else f"{each:.1e}" for each in found]
        )
    return [
        *aligned(rows),
        *(f"{name}: {ratio:.3f}" for name, ratio in document["ratios"].items()),
    ]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = functools.partial(command.add_argument)
    add(
        "--compare",
        metavar="IMPL[,IMPL...]",
        default="reference,auto",
        help=f"of {', '.join(choose.CHOICES)}; the first is what ratios refer to (%(default)s)",
    )
    for name, what in SIZE_HELP.items():
        flag = name.replace("_", "-")
        add(f"--{flag}", type=int, default=SIZES[name], help=f"{what} (%(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of inputs and products (%(default)s)")
    add("--window", type=int, help="tokens that each one sees; all by default")
    add("--soft-cap", type=float, help="bound on the scores; none by default")
    add("--seed", type=int, default=0, help="of the random inputs (%(default)s)")
    add("--iters", type=int, default=10, help="timed rounds (%(default)s)")
    add("--warmup", type=int, default=2, help="rounds before them (%(default)s)")
