"""What an update reads and replaces: one record, sharded over the mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from learner.update.entropy_bonus import EntropyBonus
from learner.update.sharding import named_shardings
from models.device_memory import HOST_MEMORY
from models.transformer import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Master weights and optimiser state. A step donates its input: use only what it returns."""

    params: Any
    """Params: float32, layers stacked. (Any, as the record also carries shapes and shardings.)"""
    opt_state: Any
    """optax.OptState."""
    update_count: Any
    """int32 scalar: updates applied so far; a skipped one does not count."""
    entropy_bonus: EntropyBonus | None = None
    """Where its coefficient is adaptive."""


def place_params(params: Params, mesh: Mesh, specs: Params, dtype: jnp.dtype) -> Params:
    """Copies host arrays to the mesh, leaf by leaf, each device taking its shard only."""

    def place(leaf, sharding):
        # Without the copy a CPU device may borrow the caller's memory, which a step then donates.
        return jax.device_put(np.asarray(leaf).astype(dtype), sharding, may_alias=False)

    return jax.tree.map(place, params, named_shardings(mesh, specs))


def place_frozen(params: Params, mesh: Mesh, specs: Params, compute_dtype: jnp.dtype) -> Params:
    """As `place_params`, of parameters that never train: each in compute_dtype, or in its own dtype
    where that is narrower, which computes the same.
    """

    def place(leaf, sharding):
        narrow = leaf.dtype.itemsize <= jnp.dtype(compute_dtype).itemsize
        held = np.asarray(leaf) if narrow else np.asarray(leaf).astype(compute_dtype)
        return jax.device_put(held, sharding, may_alias=False)

    return jax.tree.map(place, params, named_shardings(mesh, specs))


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    specs: Params,
    entropy_bonus: EntropyBonus | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """A fresh state from host parameters of any float dtype, layers stacked.

    Args:
        entropy_bonus: host scalars, where the coefficient is adaptive.
        offload: as state_shardings.
    """
    placed = place_params(params, mesh, specs, jnp.float32)
    shardings = state_shardings(placed, optimizer, mesh, specs, entropy_bonus, offload=offload)
    return TrainState(
        params=placed,
        opt_state=jax.jit(optimizer.init, out_shardings=shardings.opt_state)(placed),
        update_count=jax.device_put(np.zeros((), np.int32), shardings.update_count),
        entropy_bonus=jax.device_put(entropy_bonus, shardings.entropy_bonus),
    )


def state_shardings(
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    specs: Params,
    entropy_bonus: EntropyBonus | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """A TrainState of shardings: moments lie as their parameters do; counts, and moments of
    another shape than their parameter, are replicated.

    Args:
        offload: keep moments of their parameters' shapes in the memory of the host.

    Raises:
        ValueError: if the devices of the mesh have no such memory.
    """
    if offload:
        check_host_memory(mesh.devices.flat[0])
    replicated = NamedSharding(mesh, P())
    shardings = named_shardings(mesh, specs)

    def moment_sharding(leaf, sharding, param):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        if leaf.shape != param.shape:  # a factored moment is small, and has other axes
            return replicated
        return sharding.with_memory_kind(HOST_MEMORY) if offload else sharding

    opt_state = optax.tree.map_params(
        optimizer,
        moment_sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        params,
        transform_non_params=lambda _: replicated,
        # A part of the optimiser may leave parameters to another part: it has no moments of them.
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    return TrainState(
        params=shardings,
        opt_state=opt_state,
        update_count=replicated,
        entropy_bonus=jax.tree.map(lambda _: replicated, entropy_bonus),
    )


def abstract_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    specs: Params,
    entropy_bonus: EntropyBonus | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """Shapes, dtypes and shardings of `init_state`, without allocating anything.

    Args:
        params: arrays or shape structs; only their shapes are read.
        offload: as state_shardings.
    """
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    shapes = TrainState(
        params=params,
        opt_state=jax.eval_shape(optimizer.init, params),
        update_count=jax.ShapeDtypeStruct((), jnp.int32),
        entropy_bonus=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), entropy_bonus
        ),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(params, optimizer, mesh, specs, entropy_bonus, offload=offload),
    )


def check_host_memory(device: jax.Device) -> None:
    """Raises ValueError if the device cannot hold arrays in the memory of its host."""
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"learner.optimizer.offload=true: devices of {device.platform} have no memory of kind "
            f"{HOST_MEMORY}, only {', '.join(kinds)}; set it to false"
        )
