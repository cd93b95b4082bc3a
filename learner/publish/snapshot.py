"""The policy at one moment, on the devices: what a publication is copied from.

A step donates the parameters that it replaces. A snapshot has buffers of its own, so a publication
may be read from it for as long as that takes while the next step runs.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from learner.publish.canary import ScoredProbe
from learner.update.sharding import STACKED
from models.adapter import merge, without_adapter
from models.config import ModelConfig
from models.files.checkpoint import to_named
from models.transformer import Params
from services.weights.digest import tree_digest, wire_dtype

PUBLISH_DTYPES = {name: wire_dtype(name) for name in ("bfloat16", "float32")}
"""What parameters may be published or exported as, by name; some of all that can travel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One policy version, cut over the devices as the parameters are."""

    policy_version: int
    tensors: dict[str, jax.Array]
    """By Hugging Face's names, layers one by one, in the wire dtype. No other array shares their
    buffers, so that the owner of the snapshot may delete them."""
    probe: ScoredProbe | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.tensors.values())


def make_snapshots(
    params: Params, config: ModelConfig, adapter_scale: float = 1.0
) -> Mapping[str, Callable]:
    """Builds, for each wire dtype, `snapshot(params) -> tensors by Hugging Face's names`.

    The parameters are not donated and share no buffer with what is returned. A tensor lies as its
    parameter does: the layer axis is never cut, so that slicing a layer moves nothing.

    Args:
        params: shape structs with NamedShardings, layers stacked.
        adapter_scale: of an adapter that they have, which is merged into their weights.
    """
    listed = without_adapter(_listed(params))
    shardings = {name: struct.sharding for name, struct in to_named(listed, config).items()}

    def build(dtype: np.dtype) -> Callable:
        def snapshot(params):
            # The copy is asked for: an output that equals an input may be that very input.
            copies = lambda leaf: jnp.array(leaf, dtype, copy=True)
            merged = merge(params, adapter_scale)
            return {name: copies(leaf) for name, leaf in to_named(merged, config).items()}

        return jax.jit(snapshot, out_shardings=shardings)

    return {name: build(dtype) for name, dtype in PUBLISH_DTYPES.items()}


def _listed(params: Params) -> Params:
    """Structs of the tree with its layers listed."""
    L = jax.tree.leaves(params[STACKED])[0].shape[0]

    def without_layers(struct):
        sharding = NamedSharding(struct.sharding.mesh, P(*struct.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype, sharding=sharding)

    return {**params, STACKED: [jax.tree.map(without_layers, params[STACKED])] * L}


def base_digest(params: Params, config: ModelConfig, dtype: str | None = None) -> str:
    """The tree digest, hex, of a model that an adapter leaves as it is.

    Args:
        params: numpy arrays with stacked layers.
        dtype: `bfloat16` or `float32`, to which each tensor is cast in its turn; None takes them as
            they were stored.
    """
    named = to_named(params, config)
    if dtype is not None:
        named = {name: _Cast(leaf, PUBLISH_DTYPES[dtype]) for name, leaf in named.items()}
    return tree_digest(named)[1]


class _Cast:
    """An array in another dtype, cast each time it is converted to numpy."""

    def __init__(self, array: np.ndarray, dtype: np.dtype):
        self._array = array
        self.shape = array.shape
        self.dtype = dtype

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self._array.astype(self.dtype, copy=False), dtype)


def host_weights(
    params: Params, config: ModelConfig, dtype: str, adapter_scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Host copies of parameters on devices, under Hugging Face's names.

    One parameter at a time is cast and gathered on its way to the host. Nothing returned shares
    memory with a device.

    Args:
        dtype: `bfloat16` or `float32`.
        adapter_scale: of an adapter that they have, which is merged into their weights.
    """
    cast = lambda leaf: np.array(leaf.astype(PUBLISH_DTYPES[dtype]))
    return to_named(jax.tree.map(cast, merge(params, adapter_scale)), config)
