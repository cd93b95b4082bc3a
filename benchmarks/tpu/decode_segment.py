"""Compiles the decode loop for a TPU v6e host, without a TPU, and reports what a token costs.

    python -m deploy.tpu_decode --shape qwen2.5-3b --slots 128 --json decode.json
    python -m deploy.tpu_decode --shape smollm2 --layers 2 --tensor 1 --compare attention=f32

The same slots are decoded by eight lanes that each have the whole model (`tensor 1`), or by one
that is cut over the eight chips (`tensor 8`). The program is the engine's own segment at its widest
cache. Nothing is executed and no figure is a measured time: cycles are counted in the compiler's
schedules and bytes in the program's text, for one token step in which one row enters a slot and no
row asks for top-k or top-p. With loop=while a token bears its share of what a segment does once,
with loop=python all of it; the host's part and the wires between the chips are in neither.

Needs jax[tpu], and neither a TPU nor weights. Exits with 1 when a program does not compile or does
not fit, with 2 when the arguments are wrong.
"""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.tpu import issue_cycles
from driver.chip_plan.chips import LIBTPU_ENVIRONMENT

os.environ.update(LIBTPU_ENVIRONMENT)  # libtpu reads it when it starts

import jax
import numpy as np
from jax.experimental import topologies

from benchmarks.compiled_program import program_sizes
from benchmarks.decode.engine_passes import decode_spec
from benchmarks.decode.model_shapes import SHAPES
from benchmarks.decode.settings import check_slot_count
from benchmarks.decode.variants import DTYPES, Variant, parse_variants
from benchmarks.decode.weights import copy_bytes
from benchmarks.report_file import check_report_file, write_report
from driver.chip_plan.chips import V6E
from driver.chip_plan.compiled import cost_model, hlo
from driver.chip_plan.published_models import with_layers
from models.config import ModelConfig
from rollout_worker.engine.decode_programs import DecodePrograms
from rollout_worker.engine.engine_limits import EngineLimits, geometry_of
from rollout_worker.engine.layout import Layout, make_mesh

CHIPS = 8
COMPARED = "loop=python,attention=f32,attention=pallas"
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """One program; all figures are of one chip, sizes in bytes."""

    name: str
    tensor: int
    slots: int
    """Of all chips together."""
    compile_s: float
    weight_bytes: int
    cache_bytes: int
    """Of the slots, at its widest."""
    pool_bytes: int
    """Of prefilled prompts."""
    error: str = ""
    """What the compiler said where it gave up."""
    temp_bytes: int = 0
    peak_bytes: int = 0
    """Arguments, outputs and temporaries; the model and the cache among them."""
    need_bytes: int = 0
    """With a second policy beside it, which is there while a new version arrives."""
    step_cycles: int = 0
    step_bytes: int = 0
    """Moved in the chip's memory by one token step."""
    once_cycles: int = 0
    once_bytes: int = 0
    """Of what a segment does once."""
    token_cycles: float = 0.0
    token_bytes: float = 0.0
    """The step, and the token's share of the rest of the segment."""
    model_ms: float = 0.0
    """Of a token by the model of driver/chip_plan/compiled/cost_model.py; no measured time."""
    collectives: int = 0
    """Of a token step."""
    without_cycles: tuple[str, ...] = ()
    """Operations that matter and whose cycles are unknown."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        check_report_file(arguments.json)
        model = _model(arguments)
        variants = parse_variants(Variant(compute_dtype=arguments.dtype), arguments.compare or None)
        limits, tensors = _limits(arguments), _tensors(arguments)
        if importlib.util.find_spec("libtpu") is None:
            raise ValueError("libtpu, the compiler, is not installed: pip install '.[tpu]'")
        with tempfile.TemporaryDirectory(prefix="tpu_decode_") as folder:
            dump = pathlib.Path(folder)
            os.environ["LIBTPU_INIT_ARGS"] = issue_cycles.DUMP_FLAGS.format(folder=dump)
            layouts = _layouts(model, tensors, arguments.dtype)
            for layout in layouts:
                _check(layout, arguments.slots, limits, variants)
            print(HEADER, flush=True)
            found = list(_compile_all(layouts, variants, limits, arguments.slots, dump))
    except ValueError as error:
        print(f"tpu_decode: {error}", file=sys.stderr)
        return 2
    bad = [one for one in found if one.error or one.need_bytes > V6E.usable_bytes]
    for one in bad:
        why = one.error or f"needs {one.need_bytes / 1e9:.2f} GB of {V6E.usable_bytes / 1e9:.2f}"
        print(f"tensor {one.tensor}, {one.name}: {why}")
    if arguments.json:
        report = {
            "model": dataclasses.asdict(model),
            "jax": jax.__version__,
            "limits": {"prompt": arguments.prompt, "new": arguments.new},
            "usable_bytes": V6E.usable_bytes,
            "fits": not bad,
            "programs": [dataclasses.asdict(one) for one in found],
        }
        write_report(report, arguments.json)
    return 1 if bad else 0


def _compile_all(
    layouts, variants, limits, slots: int, dump: pathlib.Path
) -> Iterator[SegmentCost]:
    for layout in layouts:
        for name, variant in variants.items():
            found = compile_segment(layout, name, variant, limits, slots, dump)
            print(row(found), flush=True)
            yield found


def compile_segment(
    layout: Layout,
    name: str,
    variant: Variant,
    limits: EngineLimits,
    slots: int,
    dump: pathlib.Path,
) -> SegmentCost:
    """Compiles one segment and reads what it costs.

    Args:
        slots: of all lanes together.
        dump: where this process's libtpu writes its schedules; emptied here.
    """
    for old in dump.iterdir():
        old.unlink()
    spec = decode_spec(layout, variant, slots)
    programs = DecodePrograms(spec, geometry_of(spec, limits))
    width = programs.geometry.widths[-1]
    sizes: dict[str, Any] = dict(
        name=name,
        tensor=layout.tensor,
        slots=slots,
        weight_bytes=copy_bytes(layout),
        cache_bytes=programs.cache_bytes(width),
        pool_bytes=programs.pool_bytes(),
    )
    started = time.monotonic()
    try:
        compiled = programs.compile_segment(width)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return SegmentCost(**sizes, compile_s=time.monotonic() - started, error=str(error))
    seconds = time.monotonic() - started
    needs = program_sizes(compiled)
    return SegmentCost(
        **sizes,
        compile_s=seconds,
        temp_bytes=needs["temp_bytes"],
        peak_bytes=needs["peak_bytes"],
        need_bytes=needs["peak_bytes"] + sizes["weight_bytes"],
        **token_cost(
            hlo.parse_program(str(compiled.as_text())),
            issue_cycles.read_dump(dump),
            spec.segment_tokens,
        ),
    )


def token_cost(module: hlo.Module, cycles: dict[str, int], segment_tokens: int) -> dict[str, Any]:
    """What a token costs, as `SegmentCost` has it.

    Args:
        cycles: of one execution of each operation, by its name.
    """
    cycles = with_twins(module, cycles)
    body = hlo.longest_loop(module)
    assert body is not None, "a segment is a loop over its tokens"
    step = _cost(module.entered_at(body), cycles)
    # Counted with one round of its loop, the program is the step and what is done once.
    whole = _cost(module, cycles)
    step_bytes, whole_bytes = _bytes(step), _bytes(whole)
    once_cycles, once_bytes = whole.cycles - step.cycles, whole_bytes - step_bytes
    return dict(
        step_cycles=step.cycles,
        step_bytes=step_bytes,
        once_cycles=once_cycles,
        once_bytes=once_bytes,
        token_cycles=step.cycles + once_cycles / segment_tokens,
        token_bytes=step_bytes + once_bytes / segment_tokens,
        model_ms=step.ms + (whole.ms - step.ms) / segment_tokens,
        collectives=sum(op.times for op in step.ops if _is_collective(op.opcode)),
        without_cycles=tuple(
            name for name in step.without_cycles if not name.startswith(COLLECTIVES)
        ),
    )


def _cost(module: hlo.Module, cycles: dict[str, int]) -> cost_model.ProgramCost:
    return cost_model.program_cost(hlo.ordinary_ops(module), cycles)


def with_twins(module: hlo.Module, cycles: dict[str, int]) -> dict[str, int]:
    """Cycles also of operations that share another's schedule: equal ones are scheduled once."""
    scheduled: dict[tuple, int] = {}
    without = []
    for computation in module.computations.values():
        for op in computation.values():
            if op.opcode in ("fusion", "custom-call"):
                kind = _kind(module, computation, op)
                if op.name in cycles:
                    scheduled[kind] = cycles[op.name]
                else:
                    without.append((op.name, kind))
    return cycles | {name: scheduled[kind] for name, kind in without if kind in scheduled}


def _kind(module: hlo.Module, computation: hlo.Computation, op: hlo.Op) -> tuple:
    """What decides about an operation's schedule: types with their layouts, and what it does."""
    operands = tuple(computation[name].type for name in op.operands if name in computation)
    inner: tuple = ()
    if op.opcode == "fusion":
        fused = module.computations[op.called("calls")]
        inner = tuple(_kind(module, fused, each) for each in fused.values())
    literal = op.literal if op.opcode == "constant" else ""
    return op.opcode, op.type, operands, literal, inner


def _bytes(cost: cost_model.ProgramCost) -> int:
    return sum(op.bytes for op in cost.ops)


def _is_collective(opcode: str) -> bool:
    return opcode.removesuffix("-start") in COLLECTIVES


HEADER = (
    f"{'tensor':>6}  {'variant':<27}{'slots':>6}{'compile':>9}{'weights':>9}{'KV':>7}{'pool':>7}"
    f"{'peak':>7}{'needs':>7}{'Mcycles':>9}{'GB':>8}{'model':>9}{'once':>11}  fits"
)


def row(one: SegmentCost) -> str:
    """One line under HEADER: GB of a chip; of a token its cycles, GB moved and model time."""
    start = f"{one.tensor:>6}  {one.name:<27}{one.slots:>6}{one.compile_s:>7.0f} s"
    if one.error:
        return f"{start}  does not compile"
    sizes = (one.weight_bytes, one.cache_bytes, one.pool_bytes, one.peak_bytes, one.need_bytes)
    widths = (9, 7, 7, 7, 7)
    return (
        start
        + "".join(f"{size / 1e9:>{w}.2f}" for size, w in zip(sizes, widths, strict=True))
        + f"{one.token_cycles / 1e6:>9.3f}{one.token_bytes / 1e9:>8.3f}{one.model_ms:>6.2f} ms"
        + f"{one.once_cycles / 1e6:>6.3f} Mcy"
        + f"  {'yes' if one.need_bytes <= V6E.usable_bytes else 'NO'}"
    )


def _tensors(arguments: argparse.Namespace) -> list[int]:
    tensors = arguments.tensor or [1, CHIPS]
    for tensor in tensors:
        if tensor < 1 or CHIPS % tensor:
            raise ValueError(f"--tensor {tensor} must divide the {CHIPS} chips")
        check_slot_count(arguments.slots, lanes=CHIPS // tensor)
    return tensors


def _layouts(model: ModelConfig, tensors: list[int], dtype: str) -> list[Layout]:
    # A dtype's name is numpy's only through jax, which knows bfloat16.
    weights_dtype = np.dtype(jax.numpy.dtype(dtype))
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v6e:2x4", chips_per_host_bounds=(2, 4, 1)
    )
    devices = list(topology.devices)
    return [
        Layout(model, make_mesh(devices, CHIPS // tensor, tensor), weights_dtype)
        for tensor in tensors
    ]


def _check(layout: Layout, slots: int, limits: EngineLimits, variants: dict[str, Variant]) -> None:
    for variant in variants.values():
        geometry_of(decode_spec(layout, variant, slots), limits)


def _limits(arguments: argparse.Namespace) -> EngineLimits:
    return EngineLimits(
        max_prompt_tokens=arguments.prompt,
        max_new_tokens=arguments.new,
        cache_tokens=arguments.prompt + arguments.new,
    )


def _model(arguments: argparse.Namespace) -> ModelConfig:
    return with_layers(SHAPES[arguments.shape], arguments.layers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.tpu_decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen2.5-3b", help="(%(default)s)")
    add("--layers", type=int, help="cut the model to its first LAYERS layers")
    add("--slots", type=int, default=128, help="of all chips together (%(default)s)")
    add("--prompt", type=int, default=256, help="longest prompt, in tokens (%(default)s)")
    add("--new", type=int, default=256, help="longest completion, in tokens (%(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="(%(default)s)")
    add("--tensor", type=int, action="append", help="may be given twice (default: 1 and 8)")
    add(
        "--compare",
        default=COMPARED,
        metavar="CHANGE[,CHANGE...]",
        help="variants beside loop=while attention=bf16, or '' for none (%(default)s)",
    )
    add("--json", metavar="FILE", help="write the figures there as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
