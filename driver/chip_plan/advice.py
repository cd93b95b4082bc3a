"""What to change where a run does not fit its chips."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from driver.chip_plan.memory_fit import roles_that_do_not_fit
from driver.chip_plan.run_program import TEMPORARIES, RunProgram
from driver.chip_plan.run_shape import PlanRequest, RunShape
from driver.chip_plan.search import MICROBATCH, SLOTS, Setting, largest_fitting, settings_of
from driver.chip_plan.topology import parse_topology
from driver.config.load_config import ConfigError
from driver.config.wording import say_bytes

_SETTING = {"learner": MICROBATCH, "worker": SLOTS}


def nearest_that_fits(
    request: PlanRequest,
    shape: RunShape,
    programs: Sequence[RunProgram],
    say: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """A line for each role that does not fit: the nearest value that does, compiled, or, where
    none of the setting does, other settings by arithmetic.

    Args:
        programs: of the run, compiled.
        say: called with a line for every trial.
    """
    lines = []
    usable = request.topology.usable_bytes
    for role, worst in roles_that_do_not_fit(programs, usable).items():
        (setting,) = [one for one in settings_of(shape) if one.key == _SETTING[role]]
        own = [one for one in programs if one.role == role]
        found = largest_fitting(request, setting, own, say)
        if found.fits is not None:
            lines.append(
                f"nearest that fits for the {role}: --set {' --set '.join(found.overrides)}, with "
                f"{say_bytes(found.fits.need_bytes)}"
            )
            continue
        lines.append(found.text)
        others = list(other_settings(request, shape, worst, setting))
        lines += [f"by arithmetic, not compiled, this would fit: {one}" for one in others]
        if not others:
            lines.append(
                "none of the settings that were considered makes it fit: take a smaller model, "
                "or chips with more memory"
            )
    return lines


def other_settings(
    request: PlanRequest, shape: RunShape, worst: RunProgram, setting: Setting
) -> Iterator[str]:
    """Settings with which a program would fit if its temporaries stayed as they are, or shrank with
    the smallest value of `setting`.

    Args:
        worst: the program of a role that needs the most.
    """
    temporaries = worst.parts[TEMPORARIES]
    saved = temporaries - temporaries * min(setting.step, setting.now) // setting.now
    for where, changes in _alternatives(request, shape, worst.role):
        for more, less in ((), 0), (setting.overrides(setting.step), saved):
            try:
                changed = where.shape(*changes, *more)
            except ConfigError:
                continue  # it does not go with the rest of the configuration
            need = worst.need_bytes + _named(changed, worst) - _named(shape, worst) - less
            if need <= where.topology.usable_bytes:
                on = f" --topology {where.topology.name}" if where != request else ""
                yield f"--set {' --set '.join(changes + more)}{on}, with {say_bytes(need)}"
                break


def _alternatives(
    request: PlanRequest, shape: RunShape, role: str
) -> Iterator[tuple[PlanRequest, tuple[str, ...]]]:
    config, devices = shape.config, shape.plan.devices
    kind = request.topology.kind
    if role == "worker" and not devices.shared:
        for tensor in (2, 4, 8):
            if config.rollout.decode.tensor < tensor <= devices.worker:
                yield request, (f"rollout.decode.tensor={tensor}",)
        return
    if config.learner.optimizer.moments_dtype == "float32":
        yield request, ("learner.optimizer.moments_dtype=bfloat16",)
    if config.learner.lora is None:
        yield request, ("learner.lora.rank=16",)
    if kind is None:
        return
    for chips in [count for count in kind.slices if count > devices.learner][:2]:
        asked = chips if devices.shared else chips + devices.worker
        fitting = [shape for count, shape in kind.slices.items() if count >= asked]
        if not fitting:
            continue
        fsdp = chips // config.learner.mesh.data
        larger = parse_topology(f"{kind.name}:{fitting[0]}")
        where = request
        if larger.chips > request.topology.chips:
            where = dataclasses.replace(request, topology=larger)
        yield where, (f"placement.learner.tpus={chips}", f"learner.mesh.fsdp={fsdp}")


def _named(shape: RunShape, worst: RunProgram) -> int:
    planned = next(one for one in shape.planned(worst.role) if one.name == worst.name)
    parts = [planned.inside, planned.beside, shape.others(worst.role)]
    return sum(sum(each.values()) for each in parts)
