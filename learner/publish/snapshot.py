"""The policy at one moment, on the devices: what a publication is copied from.

A step donates the parameters that it replaces. A snapshot has buffers of its own, so a publication
may be read from it for as long as that takes while the next step runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_map_with_path

from learner.publish.canary import ScoredProbe
from learner.update.sharding import STACKED
from models.adapter import digest_tensor, to_named_adapter
from models.config import ModelConfig
from models.files.checkpoint import to_named
from models.transformer import LORA_B, Params
from services.weights.digest import tree_digest, wire_dtype

PUBLISH_DTYPES = {name: wire_dtype(name) for name in ("bfloat16", "float32")}
"""What parameters may be published or exported as, by name; some of all that can travel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One policy version, cut over the devices as the parameters are."""

    policy_version: int
    tensors: dict[str, jax.Array]
    """By Hugging Face's names, layers one by one, in the wire dtype; of an adapter its own matrices
    and the digest of its base. No other array shares their buffers, so that the owner of the
    snapshot may delete them."""
    probe: ScoredProbe | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.tensors.values())


def make_snapshots(params: Params, config: ModelConfig) -> Mapping[str, Callable]:
    """Builds, for each wire dtype, `snapshot(params) -> tensors by Hugging Face's names`.

    The parameters are not donated and share no buffer with what is returned. A tensor lies as its
    parameter does: the layer axis is never cut, so that slicing a layer moves nothing.

    Args:
        params: shape structs with NamedShardings, layers stacked.
    """
    return _build(_listed(params), lambda tree: to_named(tree, config), lambda params: params)


def make_adapter_snapshots(adapter: Params, scale: float) -> Mapping[str, Callable]:
    """As `make_snapshots`, of an adapter alone, with its B multiplied by the scale.

    Args:
        adapter: shape structs with NamedShardings, layers stacked.
    """

    def scaled(path, leaf):
        return scale * leaf if path[-1].key == LORA_B else leaf

    return _build(_listed(adapter), to_named_adapter, functools.partial(tree_map_with_path, scaled))


def _build(
    listed: Params, name: Callable[[Params], dict[str, Any]], change: Callable[[Params], Params]
) -> Mapping[str, Callable]:
    """A snapshot for each wire dtype, of what `change` makes of parameters, under their names.

    Args:
        listed: their structs, with layers listed.
    """
    shardings = {key: struct.sharding for key, struct in name(listed).items()}

    def build(dtype: np.dtype) -> Callable:
        def snapshot(params):
            # The copy is asked for: an output that equals an input may be that very input.
            copies = lambda leaf: jnp.array(leaf, dtype, copy=True)
            return {key: copies(leaf) for key, leaf in name(change(params)).items()}

        return jax.jit(snapshot, out_shardings=shardings)

    return {key: build(dtype) for key, dtype in PUBLISH_DTYPES.items()}


def _listed(params: Params) -> Params:
    """Structs of the tree with its layers listed."""
    L = jax.tree.leaves(params[STACKED])[0].shape[0]

    def without_layers(struct):
        sharding = NamedSharding(struct.sharding.mesh, P(*struct.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype, sharding=sharding)

    return {**params, STACKED: [jax.tree.map(without_layers, params[STACKED])] * L}


def host_weights(params: Params, config: ModelConfig, dtype: str) -> dict[str, np.ndarray]:
    """Host copies of parameters on devices, under Hugging Face's names.

    One parameter at a time is cast and gathered on its way to the host. Nothing returned shares
    memory with a device.

    Args:
        dtype: `bfloat16` or `float32`.
    """
    cast = lambda leaf: np.array(leaf.astype(PUBLISH_DTYPES[dtype]))
    return to_named(jax.tree.map(cast, params), config)


class BaseDigest:
    """The digest of a model on the devices that never changes, as a tensor of a snapshot."""

    def __init__(self, base: Params, config: ModelConfig, mesh: Mesh):
        self._base = base
        self._config = config
        self._replicated = NamedSharding(mesh, P())
        self._known: dict[str, np.ndarray] = {}

    def tensor(self, dtype: str) -> jax.Array:
        """The tensor BASE_DIGEST of the live arrays, which are read once for each wire dtype."""
        if dtype not in self._known:
            named = host_weights(self._base, self._config, dtype)
            self._known[dtype] = digest_tensor(tree_digest(named)[1])
        return jax.device_put(self._known[dtype], self._replicated, may_alias=False)
