"""Compiles one program of kernel_programs.py for a TPU v6e chip, without a TPU, in a child process.

libtpu reads its settings once, when it starts, and may end the whole process: hence a child for
each, with a deadline. The schedules that it dumps go to a temporary folder that is watched and
deleted.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.tpu import issue_cycles
from driver.chip_plan.chips import LIBTPU_ENVIRONMENT
from driver.chip_plan.compiled import hlo

SHOWN_BYTES = 2**20
"""Arguments smaller than this are not listed with their layouts."""
DUMP_BYTES = 2 * 2**30
"""A child whose dump outgrows this is stopped: that of one program takes some 20 MB."""
POLL_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What the compiler says of one program; sizes in bytes."""

    compile_s: float = 0.0
    temp_bytes: int = 0
    """Of the heap that XLA asks for beside arguments and outputs; it may exceed what lives at a
    time, which the peak has."""
    peak_bytes: int = 0
    """Arguments, outputs and live temporaries together."""
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    """Of outputs that are donated arguments, counted in both."""
    accessed_bytes: int = 0
    """Moved in main memory, every round of a loop counted."""
    xla_accessed_bytes: int = 0
    """XLA's own figure, one round of a loop counted."""
    arrays: list[str] = dataclasses.field(default_factory=list)
    """The large arguments: name, type and entry layout."""
    ops: list[hlo.OpTraffic] = dataclasses.field(default_factory=list)
    uncounted_loops: list[str] = dataclasses.field(default_factory=list)
    op_cycles: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of one execution, by operation (issue_cycles.py)."""
    error: str = ""
    """Why there are no figures."""


def compile_here(lower: Any) -> Figures:
    """Compiles in this process, whose environment must be LIBTPU_ENVIRONMENT's.

    Args:
        lower: device -> jax.stages.Lowered.
    """
    from jax.experimental import topologies

    from benchmarks.compiled_program import accessed_bytes, program_sizes

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v6e:1x1", chips_per_host_bounds=(1, 1, 1)
    )
    started = time.monotonic()
    compiled = lower(topology.devices[0]).compile()
    compile_s = time.monotonic() - started
    module = hlo.parse_program(compiled.as_text())
    traffic = hlo.traffic(module)
    return Figures(
        compile_s=round(compile_s, 3),
        **program_sizes(compiled),
        accessed_bytes=traffic.bytes,
        xla_accessed_bytes=accessed_bytes(compiled),
        arrays=[
            f"{argument.name.split('.')[0]} {argument.type}"
            for argument in module.arguments()
            if hlo.array_bytes(argument.type) >= SHOWN_BYTES
        ],
        ops=traffic.ops,
        uncounted_loops=traffic.uncounted_loops,
    )


def compile_in_child(name: str, deadline_s: float) -> Figures:
    """Compiles a program of kernel_programs.py; a failure is in the figures' `error`."""
    with tempfile.TemporaryDirectory(prefix="tpu_report_") as folder:
        dump, result = pathlib.Path(folder) / "dump", pathlib.Path(folder) / "result.json"
        dump.mkdir()  # libtpu does not make it
        stopped, messages = _run(name, result, dump, deadline_s)
        if stopped or not result.exists():
            last = [line for line in messages.splitlines() if line.strip()][-1:]
            return Figures(error="; ".join([*filter(None, [stopped]), *last]) or "no result")
        found = json.loads(result.read_text())
        found["op_cycles"] = issue_cycles.read_dump(dump)
    found["ops"] = [hlo.OpTraffic(*op) for op in found["ops"]]
    return Figures(**found)


def _run(name: str, result: pathlib.Path, dump: pathlib.Path, deadline_s: float) -> tuple[str, str]:
    """Why the child was stopped or ended badly, if so, and what it said."""
    messages = result.with_name("messages.txt")
    flags = {"LIBTPU_INIT_ARGS": issue_cycles.DUMP_FLAGS.format(folder=dump)}
    with messages.open("w") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", "kernels.tpu_report", "--child", name, "--into", str(result)],
            env={**os.environ, **LIBTPU_ENVIRONMENT, **flags},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            stopped = _wait(child, dump, deadline_s)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return stopped, messages.read_text(errors="replace")


def _wait(child: subprocess.Popen, dump: pathlib.Path, deadline_s: float) -> str:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            code = child.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            if folder_bytes(dump) > DUMP_BYTES:
                return f"was stopped: its dump outgrew {DUMP_BYTES / 2**30:g} GiB"
            continue
        if code == 0:
            return ""
        return f"ended by signal {-code}" if code < 0 else f"ended with {code}"
    return f"was not done within {deadline_s:g} s"


def folder_bytes(folder: pathlib.Path) -> int:
    """Bytes of the files in a folder that another process writes to."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # renamed or removed since it was listed
            continue
    return total
