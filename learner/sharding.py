"""Which parameter is cut along which axis, and how it becomes whole for one layer's work.

Matrices are cut over `fsdp`; vectors (norms, biases) are small and stay whole on every device.
Under `shard_map` a device sees its shard; `make_gather` gives `models.transformer.forward` the
hook that collects a layer's matrices just before they are used. The transpose of that gather
sums the gradient over the axis and leaves each device with its shard (reduce-scatter).
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.transformer import Gather, Params

STACKED = "layers"
"""The tree whose leaves carry a leading layer axis."""


def own_ndim(path: tuple, leaf) -> int:
    """Dimensions of one parameter of one layer: 2 for a matrix, 1 for a norm or bias."""
    return leaf.ndim - (path[0].key == STACKED)


def param_specs(params: Params, fsdp: int) -> Params:
    """PartitionSpec of every leaf: its largest axis that fsdp divides, else replicated.

    The layer axis is never cut: the scan over layers would have to move whole layers around.

    Args:
        params: arrays or shape structs, layers stacked.
    """

    def spec_of(path, leaf):
        if own_ndim(path, leaf) < 2:
            return P()
        first = leaf.ndim - own_ndim(path, leaf)
        fitting = [axis for axis in range(first, leaf.ndim) if leaf.shape[axis] % fsdp == 0]
        if not fitting:
            return P()
        chosen = max(fitting, key=lambda axis: leaf.shape[axis])
        return P(*("fsdp" if axis == chosen else None for axis in range(leaf.ndim)))

    return jax.tree_util.tree_map_with_path(spec_of, params)


def is_sharded(spec: P) -> bool:
    return "fsdp" in spec


def named_shardings(mesh: Mesh, specs) -> Params:
    """The same tree with a NamedSharding for every PartitionSpec."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


def make_gather(specs: Params, compute_dtype: jnp.dtype) -> Gather:
    """The hook for `models.transformer.forward` inside `shard_map`.

    Shards travel in compute_dtype: half the bytes where that is bfloat16.
    """

    def whole(leaf, spec, *, first):
        leaf = leaf.astype(compute_dtype)
        if not is_sharded(spec):
            return leaf
        return jax.lax.all_gather(leaf, "fsdp", axis=spec.index("fsdp") - first, tiled=True)

    def gather(name, tree):
        # A layer arrives without its layer axis, its spec with it.
        first = 1 if name == STACKED else 0
        return jax.tree.map(functools.partial(whole, first=first), tree, specs[name])

    return gather


def reduce_gradients(grads: Params, specs: Params) -> Params:
    """Completes local gradients inside `shard_map`: the sum over every device.

    A sharded leaf was already summed over `fsdp` by the transpose of its gather; a replicated
    one holds this device's part only.
    """

    def reduce(grad, spec):
        return jax.lax.psum(grad, "data" if is_sharded(spec) else ("data", "fsdp"))

    return jax.tree.map(reduce, grads, specs)
