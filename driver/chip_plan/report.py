"""The plan of a run on its chips, as tables for a person and as JSON."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from driver.chip_plan.compiled.compiler_versions import compiler_versions
from driver.chip_plan.host_memory import HostMemory, host_memory
from driver.chip_plan.learner_programs import ACCUMULATE, SCORES
from driver.chip_plan.memory_fit import verdict
from driver.chip_plan.run_program import RunProgram
from driver.chip_plan.run_shape import PlanRequest, RunShape
from driver.chip_plan.search import Largest
from driver.chip_plan.topology import several_hosts
from driver.config.wording import counted, say_bytes

MODEL = "model, never measured"
_ENGINE = "worker"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipPlan:
    """What was found."""

    command: str
    """That makes it."""
    config: str
    """Path of the configuration."""
    overrides: tuple[str, ...]
    shape: RunShape
    programs: tuple[RunProgram, ...]
    fits: bool
    words: tuple[str, ...]
    """Whether it fits, what does not and what would."""
    host: HostMemory
    searched: tuple[Largest, ...] = ()

    @property
    def step_ms(self) -> dict[str, float]:
        """Milliseconds of a step by the model, with every sequence at its longest; never measured.
        A role whose programs were not all compiled is left out.
        """
        return step_ms(self.shape, self.programs)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of the figures."""
        notes = several_hosts(self.shape.topology, self.shape.plan.devices)
        if self.shape.topology.kind is None:
            workers = self.shape.config.rollout.workers.at_start
            total = sum(self.host.learner.values()) + workers * sum(self.host.worker.values())
            notes += (
                f"on the CPU the host memory of learner and {counted(workers, 'worker')}, at most "
                f"{say_bytes(total)}, comes on top of what the verdict counts: arrays of programs",
            )
        if self.shape.config.rollout.stop_strings:
            notes += (
                "the worker's segment is planned without rollout.stop_strings, whose table needs "
                "the tokenizer: 2 bytes for each token of the vocabulary and state of a match",
            )
        once = [f"{one.role} {one.name}" for one in self.programs if one.open_loops]
        if once:
            notes += (
                f"in {', '.join(once)} there are loops whose rounds depend on the data, such as "
                "those over chunks of tokens in the head: wires and model time have one round",
            )
        unknown = dict.fromkeys(name for one in self.programs for name in one.unknown_work)
        if unknown:
            notes += (
                f"the model time has no work of {', '.join(unknown)}, which state none: only the "
                "bytes that they move",
            )
        return notes


def make_plan(
    command: str, request: PlanRequest, shape: RunShape, programs: Sequence[RunProgram]
) -> ChipPlan:
    """Judges the programs of a run.

    Args:
        command: that makes the plan.
    """
    kind = shape.topology.kind
    chip = "this machine" if kind is None else f"a {kind.name} chip"
    fits, text = verdict(programs, shape.topology.usable_bytes, chip)
    return ChipPlan(
        command=command,
        config=request.path,
        overrides=request.overrides,
        shape=shape,
        programs=tuple(programs),
        fits=fits,
        words=tuple(text.splitlines()),
        host=host_memory(
            shape.config,
            shape.plan,
            state_bytes=shape.state_bytes,
            offloaded_bytes=shape.offloaded_bytes,
        ),
    )


def step_ms(shape: RunShape, programs: Sequence[RunProgram]) -> dict[str, float]:
    """As ChipPlan has it.

    A segment counts with all its tokens.
    """
    ms = {(one.role, one.name): one.model_ms for one in programs}
    plan, learner, rollout = shape.plan, shape.config.learner, shape.config.rollout
    found = {}
    accumulate, apply = ms.get(("learner", ACCUMULATE)), ms.get(("learner", "apply"))
    if accumulate is not None and apply is not None:
        once = plan.microbatches_per_update * accumulate + apply
        scores = sum(
            value or 0 for (role, name), value in ms.items() if role == "learner" and name in SCORES
        )
        publish = sum(ms.get(("learner", name)) or 0 for name in ("snapshot", "canary"))
        found["learner"] = (
            learner.updates_per_batch * once + plan.microbatches_per_update * scores + publish
        )
    segment, prefill = ms.get((_ENGINE, "segment")), ms.get((_ENGINE, "prefill"))
    if segment is not None and prefill is not None:
        at_once = plan.worker.lanes * plan.worker.lane_slots
        rounds = math.ceil(plan.worker_completions / at_once)
        geometry = shape.worker.programs.geometry
        prompts = math.ceil(plan.worker_completions / rollout.completions_per_prompt)
        chunks = math.ceil(rollout.max_prompt_tokens / geometry.chunks[-1])
        calls = math.ceil(
            prompts * chunks / (plan.worker.lanes * geometry.chunk_prompts(geometry.chunks[-1]))
        )
        segments = math.ceil(rollout.max_completion_tokens / rollout.decode.segment_tokens)
        found[_ENGINE] = rounds * segments * segment + calls * prefill
    return found


def print_plan(plan: ChipPlan, console: Console) -> None:
    """Tables and lines."""
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(_memory_table(plan))
    wires = _wire_table(plan)
    if wires.row_count:
        console.print(wires)
    for line in _lines(plan):
        say(line)
    for line in plan.words:
        say(line)


def as_json(plan: ChipPlan) -> dict[str, Any]:
    """The plan as strict JSON can hold it."""
    shape, topology = plan.shape, plan.shape.topology
    return {
        "command": plan.command,
        "config": plan.config,
        "overrides": list(plan.overrides),
        "topology": topology.name,
        "usable_bytes": topology.usable_bytes,
        "versions": compiler_versions(),
        "model": {
            "type": shape.model.model_type,
            "layers": shape.model.num_layers,
            "parameters": shape.plan.parameters,
        },
        "placement": {
            "mode": shape.config.placement.mode,
            "learner_chips": shape.plan.devices.learner,
            "worker_chips": shape.plan.devices.worker,
            "mesh": list(shape.plan.mesh),
        },
        "settings": {
            "learner.microbatch_tokens": shape.config.learner.microbatch_tokens,
            "rollout.decode.slots": shape.config.rollout.decode.slots,
            "context": shape.config.sequence_tokens,
        },
        "fits": plan.fits,
        "words": list(plan.words),
        "notes": list(plan.notes),
        "programs": [_program_json(one) for one in plan.programs],
        "step_model_ms_never_measured": _rounded(plan.step_ms),
        "wire": {
            "version_bytes": plan.host.version_bytes,
            "largest_delta_bytes": plan.host.delta_bytes,
            "whole_versions_bytes_per_step": plan.host.sent_bytes_per_step,
        },
        "host_bytes": {"learner": plan.host.learner, "worker": plan.host.worker},
        "search": [
            {
                "key": one.key,
                "now": one.now,
                "largest_that_fits": None if one.fits is None else one.fits.value,
                "text": one.text,
                "overrides": list(one.overrides),
            }
            for one in plan.searched
        ],
    }


def _program_json(one: RunProgram) -> dict[str, Any]:
    return {
        "role": one.role,
        "name": one.name,
        "needs_bytes": one.need_bytes,
        "parts": one.parts,
        "peak_bytes": one.peak_bytes,
        "accessed_bytes": one.accessed_bytes,
        "wires": {each.kind: [each.times, each.wire_bytes] for each in one.wires},
        "model_ms_never_measured": None if one.model_ms is None else round(one.model_ms, 3),
        "error": one.error.splitlines()[0] if one.error else "",
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


def _memory_table(plan: ChipPlan) -> Table:
    usable = plan.shape.topology.usable_bytes
    chip = "this machine" if plan.shape.topology.kind is None else "one chip"
    table = Table(title=f"memory of {chip}, of {say_bytes(usable)} that programs may use")
    table.add_column("program", no_wrap=True)
    for name in ("needs", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("made up of")
    for one in plan.programs:
        label = f"{one.role} {one.name}"
        if one.error and one.need_bytes <= usable:
            table.add_row(label, "", "", "does not compile")
            continue
        parts = (f"{name} {say_bytes(count)}" for name, count in one.parts.items())
        share = f"{one.need_bytes / usable:.0%}"
        table.add_row(label, say_bytes(one.need_bytes), share, ", ".join(parts))
    return table


def _wire_table(plan: ChipPlan) -> Table:
    table = Table(title=f"sent by one chip in one run of a program, and its time ({MODEL})")
    for name in ("program", "collective", "times", "bytes", "model ms"):
        table.add_column(name, justify="left" if name in ("program", "collective") else "right")
    for one in plan.programs:
        ms = "" if one.model_ms is None else f"{one.model_ms:,.2f}"
        label = f"{one.role} {one.name}"
        if not one.wires and ms:
            table.add_row(label, "", "", "", ms)
        for place, each in enumerate(one.wires):
            first = (label, ms) if place == 0 else ("", "")
            table.add_row(
                first[0], each.kind, f"{each.times:,}", say_bytes(each.wire_bytes), first[1]
            )
    return table


def _lines(plan: ChipPlan) -> list[str]:
    shape, host = plan.shape, plan.host
    lines = []
    if plan.step_ms:
        each = ", ".join(f"{role} {ms / 1e3:,.1f} s" for role, ms in plan.step_ms.items())
        lines.append(f"a step at the longest lengths ({MODEL}): {each}")
    if shape.plan.devices.shared:
        lines.append("weight sync: nothing is sent, learner and worker share their chips")
    else:
        delta = f", as a delta at most {say_bytes(host.delta_bytes)}" if host.delta_bytes else ""
        workers = shape.config.rollout.workers.at_start
        lines.append(
            f"weight sync: {say_bytes(host.version_bytes)} for each version and worker{delta}; "
            f"{counted(workers, 'worker')} at the start"
        )
    for role, parts in (("learner", host.learner), ("worker", host.worker)):
        if parts:
            text = ", ".join(f"{name} {say_bytes(count)}" for name, count in parts.items())
            total = say_bytes(sum(parts.values()))
            lines.append(f"host memory of the {role}, at most {total}: {text}")
    lines += [f"note: {note}" for note in (*plan.notes, *shape.plan.notes)]
    return lines + [f"largest {one.text}" for one in plan.searched]
