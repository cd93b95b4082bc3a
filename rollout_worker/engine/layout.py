"""The inference copy of a model on a mesh: sharded over `tensor`, replicated over `data`.

A mesh has the axes ("data", "tensor"). Along `tensor` a device holds some of the heads, of the
hidden width of the MLP and of the vocabulary. With the matrices sharded so, a token step needs two
sums over the axis in each layer and one for the embedding, and never moves a weight. Where `tensor`
exceeds the number of key/value heads, each is copied, so that every device holds the one that its
query heads use. The copy has a ModelConfig of its own, with the copied heads and the padded
vocabulary, and needs no other special case.

Dimension key:
    B: rows
    T: tokens
    D: model width
    K: key/value heads
    S: cache positions
    H: head size
    V: vocabulary (rows of the embedding)
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.adapter import (
    AdapterShape,
    adapter_of,
    adapter_shapes,
    from_named_adapter,
    join,
    to_named_adapter,
)
from models.config import ModelConfig
from models.files.checkpoint import expected_shapes, from_named, to_named
from models.transformer import LORA_A, LORA_B, Params
from rollout_worker.engine.device_copies import replicate_array

AXES = ("data", "tensor")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
BY_COLUMNS = frozenset({"o_proj", "down_proj"})
BY_VOCABULARY = frozenset({"embed_tokens", "lm_head"})
KV_HEADS = frozenset({"k_proj", "v_proj"})


def make_mesh(devices: Sequence[jax.Device], data: int, tensor: int) -> Mesh:
    """A mesh of `data` lanes, each over `tensor` consecutive devices.

    Raises:
        ValueError: unless data x tensor is the number of devices.
    """
    if min(data, tensor) < 1 or data * tensor != len(devices):
        raise ValueError(
            f"{data=} x {tensor=} = {data * tensor} must equal the {len(devices)} devices, both "
            "at least 1"
        )
    grid = np.asarray(devices).reshape(data, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def check_tensor_parallel(
    num_heads: int, num_kv_heads: int, intermediate_size: int, tensor: int
) -> int:
    """Decides from the sizes alone whether a model can be sharded over `tensor` devices.

    Returns:
        How often each key/value head is kept: device d holds head d // copies where this
        exceeds 1.

    Raises:
        ValueError: with the rule that is broken and the nearest sizes that work.
    """
    broken = _broken_rules(num_heads, num_kv_heads, intermediate_size, tensor)
    if broken:
        fitting = [
            size
            for size in range(1, num_heads + 1)
            if not _broken_rules(num_heads, num_kv_heads, intermediate_size, size)
        ]
        below = [size for size in fitting if size < tensor][-1:]
        above = [size for size in fitting if size > tensor][:1]
        nearest = " or ".join(map(str, below + above))
        raise ValueError(f"tensor={tensor} does not fit: {'; '.join(broken)}; set it to {nearest}")
    return max(tensor // num_kv_heads, 1)


def _broken_rules(
    num_heads: int, num_kv_heads: int, intermediate_size: int, tensor: int
) -> list[str]:
    if tensor < 1:
        return ["it must be at least 1"]
    broken = []
    if num_heads % tensor:
        broken.append(f"it must divide num_heads={num_heads}, a head is not split")
    if num_kv_heads % tensor and tensor % num_kv_heads:
        broken.append(
            f"it must divide num_kv_heads={num_kv_heads} or be a multiple of it, or a device's "
            "query heads would need parts of two key/value heads"
        )
    if intermediate_size % tensor:
        broken.append(f"it must divide intermediate_size={intermediate_size}")
    return broken


def inference_config(config: ModelConfig, tensor: int) -> ModelConfig:
    """The sizes of the copy: key/value heads as often as they are kept, vocabulary padded.

    Copy c of the heads is head c // copies, and query head n uses copy n // (N / K') of K' copies,
    which is still head n // (N / K).

    Raises:
        ValueError: as `check_tensor_parallel`.
    """
    copies = check_tensor_parallel(
        config.num_heads, config.num_kv_heads, config.intermediate_size, tensor
    )
    return dataclasses.replace(
        config,
        num_kv_heads=config.num_kv_heads * copies,
        vocab_size=-(-config.vocab_size // tensor) * tensor,
    )


class HostView:
    """A published tensor, read back from the devices each time it is converted to numpy.

    A JAX array keeps the host copy that numpy once asked it for, for as long as it lives. The host
    copy of a shard is freed with the shard's handle, so at most one tensor is on the host.
    """

    def __init__(
        self,
        array: jax.Array,
        restore: Callable[[np.ndarray], np.ndarray],
        shape: tuple[int, ...],
        dtype: np.dtype,
    ):
        self._array = array
        self._restore = restore
        self.shape = shape
        self.dtype = dtype

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        published = self._restore(_on_host(self._array)).astype(self.dtype, copy=False)
        return np.asarray(published, dtype)


def _on_host(array: jax.Array) -> np.ndarray:
    """The whole array from its shards, without a copy of it on a device."""
    pieces = {str(shard.index): shard for shard in array.addressable_shards}
    if len(pieces) == 1:
        (shard,) = pieces.values()
        return np.asarray(shard.data)
    whole = np.empty(array.shape, array.dtype)
    for shard in pieces.values():
        whole[shard.index] = np.asarray(shard.data)
    return whole


class Transform(NamedTuple):
    """How one published tensor is laid out in the copy, and the inverse; both on the host."""

    spec: P
    apply: Callable[[np.ndarray], np.ndarray]
    undo: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The inference copies of one model on one mesh."""

    published: ModelConfig
    mesh: Mesh
    dtype: np.dtype = BFLOAT16
    """Of all arrays of the copy."""
    adapter: AdapterShape | None = None
    """Of the adapter that stands beside the weights in the copy, if any."""

    def __post_init__(self):
        inference_config(self.published, self.tensor)  # refuses sizes that do not fit

    @property
    def config(self) -> ModelConfig:
        """The copy's own sizes: what `models.transformer.forward` is to be called with."""
        return inference_config(self.published, self.tensor)

    @property
    def tensor(self) -> int:
        """Devices over which one copy is sharded."""
        return self.mesh.shape["tensor"]

    @property
    def cache_sharding(self) -> NamedSharding:
        """Of a cache leaf [lanes x B, K, S, H], K the copy's key/value heads."""
        return NamedSharding(self.mesh, P("data", "tensor"))

    def abstract_params(self) -> Params:
        """Shapes and shardings of the copy, that of an adapter included, layers as a list."""
        base = from_named(self._structs(expected_shapes(self.config)), self.config, stacked=False)
        if self.adapter is None:
            return base
        named = self._structs(adapter_shapes(self.adapter, self.config))
        return join(base, from_named_adapter(named, self.adapter, self.config, stacked=False))

    def _structs(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(shape, self.dtype, sharding=self._sharding(name))
            for name, shape in shapes.items()
        }

    def to_inference(self, params: Params) -> Params:
        """Makes the copy on the devices, array by array.

        Args:
            params: host arrays as published, layers stacked or as a list. Device arrays go through
                the host only where `tensor` exceeds 1; else a device keeps the buffer that it has.

        Returns:
            jax arrays of `dtype` under the same names, layers as a list.

        Raises:
            ValueError: if the tree's names or shapes are not the published config's.
        """
        named = to_named(params, self.published)
        placed = {name: self._place(name, array) for name, array in named.items()}
        return from_named(placed, self.config, stacked=False)

    def _place(self, name: str, array: np.ndarray | jax.Array) -> jax.Array:
        if isinstance(array, jax.Array) and self.tensor == 1:
            return replicate_array(array, self._sharding(name), self.dtype)
        transform = transform_of(name, self.published, self.tensor)
        host = transform.apply(np.asarray(array)).astype(self.dtype, copy=False)
        placed = jax.device_put(host, self._sharding(name))
        # Transfers are asynchronous: without waiting, all converted arrays would be on the host at
        # the same time.
        return placed if host is array else jax.block_until_ready(placed)

    def from_inference(self, params: Params, dtypes: Mapping[str, np.dtype]) -> dict[str, HostView]:
        """The published tensors by Hugging Face's names, read from the copy when they are used.

        They equal the published ones bit by bit, if `dtype` can represent every value of theirs.

        Args:
            params: a copy that `to_inference` made.
            dtypes: published dtype by name.
        """
        return self._views(to_named(params, self.config), expected_shapes(self.published), dtypes)

    def _views(self, named, shapes, dtypes) -> dict[str, HostView]:
        undo = lambda name: transform_of(name, self.published, self.tensor).undo
        return {
            name: HostView(leaf, undo(name), shapes[name], np.dtype(dtypes[name]))
            for name, leaf in named.items()
        }

    def adapter_to_inference(self, named: Mapping[str, np.ndarray | jax.Array]) -> Params:
        """Makes the copy of an adapter on the devices, as `to_inference` does that of a model.

        Args:
            named: as published, by the names of models/adapter.py.

        Raises:
            ValueError: if names or shapes are not the adapter's.
        """
        assert self.adapter is not None
        from_named_adapter(named, self.adapter, self.published, stacked=False)  # checks them
        placed = {name: self._place(name, array) for name, array in named.items()}
        return from_named_adapter(placed, self.adapter, self.config, stacked=False)

    def adapter_from_inference(
        self, params: Params, dtypes: Mapping[str, np.dtype]
    ) -> dict[str, HostView]:
        """The published matrices of the adapter in a copy, as `from_inference` gives tensors."""
        assert self.adapter is not None
        named = to_named_adapter(adapter_of(params))
        return self._views(named, adapter_shapes(self.adapter, self.published), dtypes)

    def _sharding(self, name: str) -> NamedSharding:
        return NamedSharding(self.mesh, transform_of(name, self.published, self.tensor).spec)


def embed(embed_tokens: Params, token_ids_BT: jax.Array) -> jax.Array:
    """Looks tokens up in a sharded table: the `embed=` of `models.transformer.forward`.

    In the table's own dtype: of a sharded table, XLA:TPU would convert all rows to float32 in every
    token step. The compiler lets each device look among its own rows, zeros elsewhere, and sums
    over the devices. That is exact, since one device alone has the row; it does so under
    `shard_map` over "data" too.

    Returns:
        [B, T, D] in the dtype of the copy.
    """
    return embed_tokens["weight"][token_ids_BT]


def transform_of(name: str, published: ModelConfig, tensor: int) -> Transform:
    """How the tensor of this Hugging Face name is laid out for `tensor` devices."""
    *_, module, kind = name.split(".")
    same = lambda array: array
    if module in (LORA_A, LORA_B):
        return _adapter_transform(name.removesuffix(f".{module}.{kind}"), module, published, tensor)
    if module in BY_VOCABULARY:
        return _padded(published.vocab_size, tensor)
    if module in BY_COLUMNS:
        return Transform(P(None, "tensor") if kind == "weight" else P(), same, same)
    if module not in BY_ROWS:
        return Transform(P(), same, same)
    copies = inference_config(published, tensor).num_kv_heads // published.num_kv_heads
    if module in KV_HEADS and copies > 1:
        return _copied(published, copies)
    return Transform(P("tensor"), same, same)


def _adapter_transform(
    projection: str, matrix: str, published: ModelConfig, tensor: int
) -> Transform:
    """A is cut as the projection's columns are, and B as its rows; the rank is never cut."""
    weight = transform_of(f"{projection}.weight", published, tensor)
    by_columns = projection.rpartition(".")[2] in BY_COLUMNS
    if by_columns == (matrix == LORA_A):
        return weight
    same = lambda array: array
    return Transform(P(), same, same)


def _padded(vocab_size: int, tensor: int) -> Transform:
    """Rows of zeros below a vocabulary that `tensor` does not divide."""
    padding = -vocab_size % tensor
    pad = lambda array: np.pad(array, ((0, padding), (0, 0))) if padding else array
    return Transform(P("tensor"), pad, lambda array: array[:vocab_size])


def _copied(published: ModelConfig, copies: int) -> Transform:
    """Each key/value head `copies` times in a row; of a matrix or of a bias."""
    K, H = published.num_kv_heads, published.head_dim

    def copy(array):
        heads = array.reshape(K, H, *array.shape[1:])
        return np.repeat(heads, copies, axis=0).reshape(-1, *array.shape[1:])

    def first(array):
        heads = array.reshape(K, copies, H, *array.shape[1:])
        return heads[:, 0].reshape(-1, *array.shape[1:])

    return Transform(P("tensor"), copy, first)
