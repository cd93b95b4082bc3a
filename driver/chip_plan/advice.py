"""What to change where a run does not fit its chips."""

import dataclasses
from collections.abc import Iterator, Sequence

from driver.chip_plan.memory_fit import roles_that_do_not_fit
from driver.chip_plan.run_program import TEMPORARIES, RunProgram
from driver.chip_plan.run_shape import PlanRequest, RunShape
from driver.chip_plan.search import MICROBATCH, SLOTS, LargestSearch, Setting, settings_of
from driver.chip_plan.topology import parse_topology
from driver.config.load_config import ConfigError
from driver.config.wording import say_bytes

_SETTING = {"learner": MICROBATCH, "worker": SLOTS}


def nearest_that_fits(
    request: PlanRequest, shape: RunShape, programs: Sequence[RunProgram], search: LargestSearch
) -> list[str]:
    """A line for each role that does not fit: the nearest value that does, compiled, or, where
    none of the setting does, other settings by arithmetic.

    Args:
        programs: of the run, compiled.
    """
    lines = []
    for role in roles_that_do_not_fit(programs, request.topology.usable_bytes):
        own = [one for one in programs if one.role == role]
        found = search.largest_fitting(_setting_of(shape, role), own)
        if found.fits is not None:
            lines.append(
                f"nearest that fits for the {role}: --set {' --set '.join(found.overrides)}, with "
                f"{say_bytes(found.fits.need_bytes)}"
            )
            continue
        lines.append(found.text)
        others = list(other_settings(request, shape, own))
        lines += [f"by arithmetic, not compiled, this would fit: {one}" for one in others]
        if not others:
            lines.append(
                "none of the settings that were considered makes it fit: take a smaller model, "
                "or chips with more memory"
            )
    return lines


def other_settings(
    request: PlanRequest, shape: RunShape, own: Sequence[RunProgram]
) -> Iterator[str]:
    """Settings with which the programs of a role would fit if their temporaries stayed as they are,
    or shrank with the smallest value of the role's setting.

    Args:
        own: all programs of one role, compiled.
    """
    role = own[0].role
    setting, before = _setting_of(shape, role), _named(shape, role)
    for where, changes in _alternatives(request, shape, role):
        try:
            least = _setting_of(where.shape(*changes), role).least
            for more, part in ((), 1.0), (setting.overrides(least), min(1.0, least / setting.now)):
                after = _named(where.shape(*changes, *more), role)
                need = max(
                    one.need_bytes + after[one.name] - before[one.name] - _saved(one, setting, part)
                    for one in own
                    if one.name in after
                )
                if need <= where.topology.usable_bytes:
                    on = f" --topology {where.topology.name}" if where != request else ""
                    yield f"--set {' --set '.join(changes + more)}{on}, with {say_bytes(need)}"
                    break
        except ConfigError:
            continue  # it does not go with the rest of the configuration


def _setting_of(shape: RunShape, role: str) -> Setting:
    return next(one for one in settings_of(shape) if one.key == _SETTING[role])


def _named(shape: RunShape, role: str) -> dict[str, int]:
    """Bytes with a name while a program runs, for each program of a role."""
    others = sum(shape.others(role).values())
    return {
        one.name: sum(one.inside.values()) + sum(one.beside.values()) + others
        for one in shape.planned(role)
    }


def _saved(program: RunProgram, setting: Setting, part: float) -> int:
    """Of temporaries, where the value of the setting is this part of the present one."""
    return int(program.parts[TEMPORARIES] * (1 - part)) * (program.name in setting.programs)


def _alternatives(
    request: PlanRequest, shape: RunShape, role: str
) -> Iterator[tuple[PlanRequest, tuple[str, ...]]]:
    devices, learner = shape.plan.devices, shape.config.learner
    if role == "worker" and not devices.shared:
        for tensor in (2, 4, 8):
            if shape.config.rollout.decode.tensor < tensor <= devices.worker:
                yield request, (f"rollout.decode.tensor={tensor}",)
        return
    on_cpu = request.topology.kind is None
    if learner.optimizer.moments_dtype == "float32":
        yield request, ("learner.optimizer.moments_dtype=bfloat16",)
    if not learner.optimizer.offload and not on_cpu:
        yield request, ("learner.optimizer.offload=true",)
    if learner.lora is None:
        yield request, ("learner.lora.rank=16",)
    mesh = shape.plan.mesh
    for parts in (2, 4, 8):
        if role == "learner" and mesh.fsdp % parts == 0:
            context = f"learner.mesh.context={parts * mesh.context}"
            yield request, (context, f"learner.mesh.fsdp={mesh.fsdp // parts}")
    yield from _more_chips(request, shape)


def _more_chips(
    request: PlanRequest, shape: RunShape
) -> Iterator[tuple[PlanRequest, tuple[str, ...]]]:
    """The next two numbers of chips for the learner, each with a topology that has as many."""
    kind, devices, mesh = request.topology.kind, shape.plan.devices, shape.plan.mesh
    if kind is None:
        return
    workers = 0 if devices.shared else shape.config.rollout.workers.at_start * devices.worker
    for chips in [count for count in kind.slices if count > devices.learner][:2]:
        fitting = [one for count, one in kind.slices.items() if count >= chips + workers]
        if not fitting:
            continue
        where = request
        if chips + workers > request.topology.chips:
            larger = parse_topology(f"{kind.name}:{fitting[0]}")
            larger = dataclasses.replace(larger, usable_bytes=request.topology.usable_bytes)
            where = dataclasses.replace(request, topology=larger)
        fsdp = chips // (mesh.data * mesh.context)
        yield where, (f"placement.learner.tpus={chips}", f"learner.mesh.fsdp={fsdp}")
