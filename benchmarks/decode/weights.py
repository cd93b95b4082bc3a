"""The inference copy that a bench runs: random, made where it lies, or a model's own."""

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from models.files.checkpoint import expected_shapes, load_model, save_model
from models.transformer import Params
from rollout_worker.engine.layout import Layout

STANDARD_DEVIATION = 0.02
"""Of random matrices: published models are initialised so."""


def random_params(layout: Layout, seed: int) -> Params:
    """Matrices and biases are normal, norms are one."""
    structs = layout.abstract_params()
    paths, treedef = jax.tree_util.tree_flatten_with_path(structs)
    keys = jax.random.split(jax.random.key(seed), len(paths))
    leaves = []
    for key, (path, struct) in zip(keys, paths, strict=True):
        is_norm = "norm" in jax.tree_util.keystr(path)
        make = _maker(struct.shape, struct.dtype, struct.sharding, is_norm)
        leaves.append(make(key))
    return jax.block_until_ready(jax.tree.unflatten(treedef, leaves))


@functools.cache
def _maker(shape, dtype, sharding, is_norm: bool):
    def make(key):
        if is_norm:
            return jnp.ones(shape, dtype)
        return STANDARD_DEVIATION * jax.random.normal(key, shape, dtype)

    return jax.jit(make, out_shardings=sharding)


def stored_params(layout: Layout, path: str) -> Params:
    """The weights of a folder, a GGUF file or a hub id."""
    return layout.to_inference(load_model(path).params)


def export(layout: Layout, params: Params, folder: pathlib.Path) -> None:
    """Writes the copy as a folder that transformers loads."""
    dtypes = dict.fromkeys(expected_shapes(layout.published), layout.dtype)
    views = layout.from_inference(params, dtypes)
    arrays = {name: np.asarray(view) for name, view in views.items()}
    save_model(folder, layout.published, arrays)


def weight_bytes(layout: Layout) -> int:
    """Bytes of weights that a device reads in a token step: all but an untied embedding's rows."""
    structs = layout.abstract_params()
    if "lm_head" in structs:
        structs = {name: tree for name, tree in structs.items() if name != "embed_tokens"}
    return _shard_bytes(structs)


def copy_bytes(layout: Layout) -> int:
    """Bytes of the whole copy on a device."""
    return _shard_bytes(layout.abstract_params())


def _shard_bytes(structs) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(structs)
    )
