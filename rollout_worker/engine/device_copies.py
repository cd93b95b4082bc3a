"""Replicates device arrays of this process on every device of a worker's mesh.

For a learner and a worker in one process. Nothing passes through the host. No program runs on
several devices together either: the learner may be running one at the same time, and two such
programs that devices start in different orders wait for each other for ever.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def replicate_array(array: jax.Array, sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
    """The same values, whole on every device of `sharding`.

    A device that holds all of the array in this dtype keeps its own buffer, without a copy; others
    receive the pieces that they lack, from device to device.

    Args:
        array: sharded along one axis at most.
        sharding: fully replicated, over devices of this process.

    Raises:
        ValueError: if the array is sharded along several axes.
    """
    assert sharding.shard_shape(array.shape) == array.shape, sharding
    own = {shard.device: shard.data for shard in array.addressable_shards}
    whole = [
        _cast(own[device] if _is_whole(own.get(device), array) else _joined(array, device), dtype)
        for device in sharding.addressable_devices_indices_map(array.shape)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, whole)


def _is_whole(piece: jax.Array | None, array: jax.Array) -> bool:
    return piece is not None and piece.shape == array.shape


def _cast(array: jax.Array, dtype: np.dtype) -> jax.Array:
    return array if array.dtype == dtype else array.astype(dtype)


def _joined(array: jax.Array, device: jax.Device) -> jax.Array:
    """All pieces of an array, copied to one device and joined there."""
    pieces = {}
    for shard in array.addressable_shards:
        box = tuple(part.indices(n)[:2] for part, n in zip(shard.index, array.shape, strict=True))
        if box not in pieces or shard.device == device:
            pieces[box] = shard.data
    cut = [
        axis
        for axis, length in enumerate(array.shape)
        if any(box[axis] != (0, length) for box in pieces)
    ]
    if len(cut) > 1:
        raise ValueError(f"{array.sharding} cuts {list(array.shape)} along {len(cut)} axes, not 1")
    here = [jax.device_put(pieces[box], device) for box in sorted(pieces)]
    return jnp.concatenate(here, cut[0]) if cut else here[0]
