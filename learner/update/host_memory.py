"""Optimiser state in the memory of the host: between updates it takes none of the devices'.

Only `apply` reads it, on the devices, where it replaces it in place; so it is moved there before
and back after, and the room is free for the activations of `accumulate`. Transfers inside the
program are scheduled all at once by the TPU's compiler, with old and new moments beside each other.
"""

import dataclasses
from typing import Any

import jax

from learner.update.state import TrainState
from models.device_memory import HOST_MEMORY

_DEVICE_MEMORY = "device"


def on_devices(state: TrainState) -> TrainState:
    """The state as `apply` takes it; of arrays, or of shape structs.

    Where nothing lies in the memory of the host, it is the same.
    """

    def moved(leaf):
        if leaf.sharding.memory_kind != HOST_MEMORY:
            return leaf
        sharding = leaf.sharding.with_memory_kind(_DEVICE_MEMORY)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return dataclasses.replace(state, opt_state=jax.tree.map(moved, state.opt_state))


def at_rest(state: TrainState, like: TrainState) -> TrainState:
    """The inverse of `on_devices`; waits for the transfers.

    Args:
        like: shapes with the shardings of a state between updates.
    """

    def moved(leaf, shape):
        if shape.sharding.memory_kind != HOST_MEMORY:
            return leaf
        return jax.device_put(leaf, shape.sharding)

    opt_state: Any = jax.tree.map(moved, state.opt_state, like.opt_state)
    return dataclasses.replace(state, opt_state=jax.block_until_ready(opt_state))
