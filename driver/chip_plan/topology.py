"""The devices that a plan is made for, and which of them a process sees."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence

import jax
import psutil
from jax.experimental import topologies

from driver.chip_plan.chips import TPUS, ChipKind
from driver.config.load_config import ConfigError
from driver.config.plan import Devices
from driver.config.run_config import RunConfig

CPU = "cpu"
EXAMPLES = "v6e:2x4, v6e:4x4, v5e:2x4, v5p:2x2x1 or cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """The devices of one run."""

    name: str
    """As it was given."""
    kind: ChipKind | None
    """None for the CPU of this machine, whose rates are unknown."""
    chips: int
    usable_bytes: int
    """Of one chip, or of this machine's memory."""

    @property
    def platform(self) -> str:
        """As placement.platform has it."""
        return CPU if self.kind is None else "tpu"


def parse_topology(text: str, usable_gib: float | None = None) -> Topology:
    """The topology of `KIND:AxB`, or `cpu`.

    Args:
        usable_gib: memory of a chip that programs may use; None takes the kind's.

    Raises:
        ConfigError: if there is none of that name, with those that there are.
    """
    if usable_gib is not None and not (usable_gib > 0 and math.isfinite(usable_gib * 2**30)):
        raise ConfigError(
            f"--usable-gib {usable_gib:g} must be a finite number above 0: leave it out for all "
            "that programs may use"
        )
    usable = None if usable_gib is None else max(1, round(usable_gib * 2**30))
    if text == CPU:
        memory = psutil.virtual_memory().total
        return Topology(name=CPU, kind=None, chips=1, usable_bytes=usable or memory)
    name, _, shape = text.partition(":")
    kind = TPUS.get(name)
    if kind is None:
        raise ConfigError(
            f"--topology {text}: there is no chip {name!r}; write a kind of "
            f"{', '.join(TPUS)} and the shape of its chips, such as {EXAMPLES}"
        )
    shapes = list(kind.slices.values())
    if not re.fullmatch(r"\d+(x\d+)+", shape) or shape not in shapes:
        raise ConfigError(
            f"--topology {text}: {shape!r} is no shape of {name} chips; write one of "
            f"{', '.join(f'{name}:{one}' for one in shapes)}"
        )
    chips = math.prod(_sides(shape))
    return Topology(name=text, kind=kind, chips=chips, usable_bytes=usable or kind.usable_bytes)


def check_run_on(topology: Topology, config: RunConfig, devices: Devices) -> None:
    """Refuses a run that cannot be compiled for a topology.

    Raises:
        ConfigError: with value, rule and fix.
    """
    platform = config.placement.platform
    if platform != topology.platform:
        raise ConfigError(
            f"placement.platform={platform}, but --topology {topology.name} is one of "
            f"{topology.platform}: " + _fix_platform(platform, topology)
        )
    if config.rollout.decode.loop != "while":
        raise ConfigError(
            f"rollout.decode.loop={config.rollout.decode.loop}: only `while` is one program that "
            "can be compiled; plan with --set rollout.decode.loop=while"
        )
    if topology.kind is None:
        return
    workers = config.rollout.workers.at_start
    asked = devices.learner if devices.shared else devices.learner + workers * devices.worker
    if asked > topology.chips:
        parts = f"{devices.learner} for the learner"
        if not devices.shared:
            parts += f" and {devices.worker} for each of {workers} rollout worker(s)"
        raise ConfigError(
            f"placement asks for {asked} chips, {parts}, but --topology {topology.name} has "
            f"{topology.chips}: lower placement.learner.tpus, placement.rollout.tpus or "
            f"rollout.workers{_larger(topology, asked)}"
        )
    for key, count in (("learner", devices.learner), ("rollout", devices.worker)):
        if count not in topology.kind.slices:
            raise ConfigError(
                f"placement.{key}.tpus={count}: a process can have {_counts(topology.kind)} chips "
                f"of {topology.kind.name}; set one of these"
            )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology {topology.name}: libtpu, the compiler, is not installed: "
            "pip install '.[tpu]'"
        )


def several_hosts(topology: Topology, devices: Devices) -> tuple[str, ...]:
    """A note for each role whose chips are those of several hosts."""
    if topology.kind is None:
        return ()
    most = topology.kind.host_chips
    roles = {"learner": devices.learner} | ({} if devices.shared else {"worker": devices.worker})
    return tuple(
        f"the {count} chips of the {role} are those of {count // most} hosts with {most} each, and "
        "a role is one process on one host: this plan says what would fit, not that it can start"
        for role, count in roles.items()
        if count > most
    )


def devices_of(topology: Topology, count: int) -> Sequence[jax.Device]:
    """The chips of a process that has this number of them, for the compiler only."""
    if topology.kind is None:
        return jax.devices(CPU)[:count]
    shape = topology.kind.slices[count]
    bounds = {}
    if count <= topology.kind.host_chips:
        bounds["chips_per_host_bounds"] = (*_sides(shape), 1)[:3]
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{topology.kind.name}:{shape}", **bounds
    )
    return list(described.devices)


def _fix_platform(platform: str, topology: Topology) -> str:
    if platform == "gpu":
        return "there is no compiler for GPUs without one; set placement.platform to plan for this"
    other = "give --topology cpu" if platform == CPU else f"give --topology {EXAMPLES}"
    return f"{other}, or --set placement.platform={topology.platform} with its devices"


def _larger(topology: Topology, asked: int) -> str:
    assert topology.kind is not None
    fitting = [shape for count, shape in topology.kind.slices.items() if count >= asked]
    return f", or give --topology {topology.kind.name}:{fitting[0]}" if fitting else ""


def _counts(kind: ChipKind) -> str:
    return ", ".join(map(str, kind.slices))


def _sides(shape: str) -> list[int]:
    return [int(side) for side in shape.split("x")]
