"""Arrays of the devices on the host, each once.

jax keeps what it has brought to the host with the array, for as long as that lives: of each shard
and of the whole. What is read here is read through handles of its own, and goes with them.
"""

from typing import Any

import jax
import numpy as np


def own_handle(array: jax.Array) -> jax.Array:
    """The same buffers under a new jax.Array, which has no copy on the host yet."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def begin_transfer(array: jax.Array) -> list[jax.Shard]:
    """Begins to bring an array to the host.

    Returns:
        its distinct shards, each with the `index` of its place. What numpy reads from
        their `data` may lie in the memory of a device (of a CPU, or kind pinned_host), and is gone
        with them.
    """
    shards = {str(shard.index): shard for shard in own_handle(array).addressable_shards}
    for shard in shards.values():
        shard.data.copy_to_host_async()
    return [*shards.values()]


def copy_to_host(tree: Any) -> Any:
    """The arrays of a tree as numpy arrays of their own, which no later update changes.

    A leaf is on its way while the one before is put together: beside the copy, the host has the
    shards of two leaves at most.
    """
    leaves, structure = jax.tree.flatten(tree)
    copies, under_way = [], []
    for leaf in leaves:
        under_way.append(begin_transfer(leaf))
        if len(under_way) > 1:
            copies.append(_assembled(leaves[len(copies)], under_way.pop(0)))
    copies += [_assembled(leaf, under_way.pop()) for leaf in leaves[-1:]]
    return jax.tree.unflatten(structure, copies)


def _assembled(array: jax.Array, shards: list[jax.Shard]) -> np.ndarray:
    whole = np.empty(array.shape, array.dtype)
    for shard in shards:
        whole[shard.index] = np.asarray(shard.data)
    return whole
