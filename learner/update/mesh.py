"""The learner's device mesh: `data` copies of a parameter set cut into `fsdp` shards."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp")


def mesh_shape(*, data: int, fsdp: int, devices: int) -> tuple[int, int]:
    """Sizes of the two axes; an axis of -1 takes all devices that remain.

    Raises:
        ValueError: if the axes cannot cover exactly the devices.
    """
    given = f"learner.mesh.data={data}, learner.mesh.fsdp={fsdp}"
    if any(size == 0 or size < -1 for size in (data, fsdp)) or (data, fsdp) == (-1, -1):
        raise ValueError(f"{given}: axes must be positive, and at most one may be -1")
    known = data if fsdp == -1 else fsdp
    if -1 in (data, fsdp):
        if devices % known:
            raise ValueError(
                f"{given}: {devices} devices are not divisible by {known}, so -1 has no value"
            )
        data = devices // known if data == -1 else data
        fsdp = devices // known if fsdp == -1 else fsdp
    if data * fsdp != devices:
        raise ValueError(
            f"{given}: data x fsdp = {data * fsdp} must equal the {devices} devices at hand; "
            "set one of them to -1"
        )
    return data, fsdp


def make_mesh(*, data: int, fsdp: int, devices: Sequence[jax.Device]) -> Mesh:
    """A (data, fsdp) mesh over these devices, in their order.

    Raises:
        ValueError: as mesh_shape.
    """
    shape = mesh_shape(data=data, fsdp=fsdp, devices=len(devices))
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 2)
