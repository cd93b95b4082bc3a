"""The learner's device mesh: `data` copies of a parameter set, cut into `fsdp` x `context` shards.

The devices of `context` share the tokens of each row (learner/update/context.py); those of `data`
and `fsdp` have rows of their own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

CONTEXT = "context"
ROWS = ("data", "fsdp")
"""The axes that divide the rows of a micro-batch."""
AXES = (*ROWS, CONTEXT)
SHARDS = ("fsdp", CONTEXT)
"""The axes that divide a parameter."""
TOKENS = P(ROWS, CONTEXT)
"""Of arrays [B, T] on the mesh, their chunks in the order of learner/update/context.py."""


class MeshShape(NamedTuple):
    """Sizes of the axes."""

    data: int
    fsdp: int
    context: int

    @classmethod
    def of(cls, mesh: Mesh) -> "MeshShape":
        """Of a mesh that `make_mesh` made."""
        return cls(*(mesh.shape[axis] for axis in AXES))

    @property
    def shards(self) -> int:
        """Devices over which a parameter is cut."""
        return self.fsdp * self.context

    @property
    def rows(self) -> int:
        """Parts into which the rows of a micro-batch are divided."""
        return self.data * self.fsdp


def mesh_shape(*, data: int, fsdp: int, context: int = 1, devices: int) -> MeshShape:
    """Sizes of the axes; `data` or `fsdp` of -1 takes all devices that remain.

    Raises:
        ValueError: if the axes cannot cover exactly the devices.
    """
    given = f"learner.mesh.data={data}, learner.mesh.fsdp={fsdp}"
    if context != 1:
        given += f", learner.mesh.context={context}"
    if any(size == 0 or size < -1 for size in (data, fsdp)) or (data, fsdp) == (-1, -1):
        raise ValueError(f"{given}: axes must be positive, and at most one may be -1")
    if context < 1:
        raise ValueError(f"{given}: context must be positive; set it to 1 for whole rows")
    if -1 in (data, fsdp):
        known = context * max(data, fsdp)
        if devices % known:
            raise ValueError(
                f"{given}: {devices} devices are not divisible by {known}, so -1 has no value"
            )
        data = devices // known if data == -1 else data
        fsdp = devices // known if fsdp == -1 else fsdp
    if data * fsdp * context != devices:
        product = "data x fsdp" + " x context" * (context != 1)
        raise ValueError(
            f"{given}: {product} = {data * fsdp * context} must equal the {devices} devices at "
            "hand; set one of data and fsdp to -1" + ", or lower context" * (context != 1)
        )
    return MeshShape(data, fsdp, context)


def make_mesh(*, data: int, fsdp: int, context: int = 1, devices: Sequence[jax.Device]) -> Mesh:
    """A (data, fsdp, context) mesh over these devices, in their order.

    Raises:
        ValueError: as mesh_shape.
    """
    shape = mesh_shape(data=data, fsdp=fsdp, context=context, devices=len(devices))
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)
