"""Which parameter is cut along which axis, and how it becomes whole for one layer's work.

Matrices are cut over the axes SHARDS of the mesh; vectors (norms, biases) are small and stay whole.
Under `shard_map` a device sees its shard; `make_gather` gives `models.transformer.forward` the
hook that collects a layer's matrices just before they are used. The transpose of that gather
sums the gradient over the axis and leaves each device with its shard (reduce-scatter). Embedding
and head, the largest matrices, stay cut where they can be cut by rows: there the tokens travel
(`make_embed`, learner/update/head.py).
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from learner.update.mesh import AXES, SHARDS
from models.transformer import LORA_B, Embed, Gather, Params, look_up

STACKED = "layers"
"""The tree whose leaves carry a leading layer axis."""


def own_ndim(path: tuple, leaf) -> int:
    """Dimensions of one parameter of one layer: 2 for a matrix, 1 for a norm or bias."""
    return leaf.ndim - (path[0].key == STACKED)


def param_specs(params: Params, shards: int) -> Params:
    """PartitionSpec of every leaf: its largest axis that `shards` divides, else replicated.

    The layer axis is never cut: the scan over layers would have to move whole layers around.

    Args:
        params: arrays or shape structs, layers stacked.
        shards: devices over which a parameter is cut.
    """

    def spec_of(path, leaf):
        if own_ndim(path, leaf) < 2:
            return P()
        first = leaf.ndim - own_ndim(path, leaf)
        fitting = [axis for axis in range(first, leaf.ndim) if leaf.shape[axis] % shards == 0]
        if not fitting:
            return P()
        chosen = max(fitting, key=lambda axis: leaf.shape[axis])
        return P(*(SHARDS if axis == chosen else None for axis in range(leaf.ndim)))

    return jax.tree_util.tree_map_with_path(spec_of, params)


def is_sharded(spec: P) -> bool:
    """Whether the parameter is cut."""
    return SHARDS in spec


def cut_by_rows(spec: P) -> bool:
    """Whether an embedding or a head [V, D] is cut along its vocabulary."""
    return tuple(spec[:1]) == (SHARDS,)


def named_shardings(mesh: Mesh, specs) -> Params:
    """The same tree with a NamedSharding for every PartitionSpec."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


def make_gather(specs: Params, compute_dtype: jnp.dtype, adapter_scale: float = 1.0) -> Gather:
    """The hook for `models.transformer.forward` inside `shard_map`.

    Shards travel in compute_dtype: half the bytes where that is bfloat16.

    Args:
        adapter_scale: multiplies the B of every adapter, before the cast (models/adapter.py).
    """

    def whole(path, leaf, spec, *, first):
        if path[-1].key == LORA_B:
            leaf = adapter_scale * leaf
        leaf = leaf.astype(compute_dtype)
        if not is_sharded(spec):
            return leaf
        return jax.lax.all_gather(leaf, SHARDS, axis=spec.index(SHARDS) - first, tiled=True)

    def gather(name, tree):
        # A layer arrives without its layer axis, its spec with it.
        first = 1 if name == STACKED else 0
        whole_leaf = functools.partial(whole, first=first)
        return jax.tree_util.tree_map_with_path(whole_leaf, tree, specs[name])

    return gather


def make_embed(specs: Params, compute_dtype: jnp.dtype) -> Embed | None:
    """The hook that looks tokens up without gathering an embedding that is cut by rows.

    Every device looks the tokens of all shards up in its own rows instead, and the results are
    summed where the tokens belong.
    Exactly one device has a token's row, so the sum that brings it back is exact in compute_dtype;
    the gradient is summed in float32 where it stays. None where the rows are not cut.
    """
    if not cut_by_rows(specs["embed_tokens"]["weight"]):
        return None

    def embed(tree, token_ids_BT):
        shape, rows = token_ids_BT.shape, tree["weight"].shape[0]
        token_ids_N = jax.lax.all_gather(token_ids_BT.reshape(-1), SHARDS, tiled=True)
        row_N = token_ids_N - jax.lax.axis_index(SHARDS) * rows
        here_N1 = ((row_N >= 0) & (row_N < rows))[:, None]
        found_ND = jnp.where(here_N1, look_up(tree, jnp.clip(row_N, 0, rows - 1)), 0.0)
        own_ND = jax.lax.psum_scatter(found_ND.astype(compute_dtype), SHARDS, tiled=True)
        return own_ND.reshape(*shape, -1)

    return embed


def reduce_gradients(grads: Params, specs: Params) -> Params:
    """Completes local gradients inside `shard_map`: the sum over every device.

    A sharded leaf was already summed over SHARDS by the transpose of its gather; a replicated
    one holds this device's part only.
    """

    def reduce(grad, spec):
        return jax.lax.psum(grad, "data" if is_sharded(spec) else AXES)

    return jax.tree.map(reduce, grads, specs)
