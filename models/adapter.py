"""Low-rank adapters (LoRA): two thin matrices beside a projection, which train in its place.

A projection W [out, in] with an adapter computes x W^T + s (x A^T) B^T, with s = alpha / rank.
Source: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1; start and scale are those of PEFT.

In a tree of parameters A and B stand beside the weight, as `lora_A` and `lora_B`. The model itself
(`models.transformer.Linear`) knows no scale: its B is s B.

Dimension key:
    L: layers
    r: rank of the adapter
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.transformer import LORA_A, LORA_B, Params, abstract_params

LAYERS = "layers"
BASE_DIGEST = "base_digest"
"""Of the tensor, uint8 [32], that travels with an adapter: the tree digest of its base as the wire
has it, so that the digest of a version covers both."""
_SHOWN = 4
_SMALLEST_RMS = 1e-20
"""Keeps a division finite; far below that of any matrix that has trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """Which projections of a layer have an adapter, and of which size."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Such as `self_attn.q_proj`, of every layer, in the model's order."""

    @property
    def scale(self) -> float:
        """The s of x W^T + s (x A^T) B^T."""
        return self.alpha / self.rank


@functools.cache
def projections(config: ModelConfig) -> Mapping[str, tuple[int, int]]:
    """(out, in) of every linear projection of a layer, by its name within the layer."""
    found = {}
    for part, tree in abstract_params(config)[LAYERS].items():
        for name, leaves in tree.items():
            if isinstance(leaves, Mapping) and leaves["weight"].ndim == 3:
                found[f"{part}.{name}"] = leaves["weight"].shape[1:]
    order = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return dict(sorted(found.items(), key=lambda item: order.index(item[0].split(".")[1])))


def adapter_shape(
    targets: Sequence[str], *, rank: int, alpha: float, config: ModelConfig
) -> AdapterShape:
    """The adapter of the projections that these patterns name.

    Args:
        targets: patterns of fnmatch, compared with the name of each projection, such as
            `model.layers.0.self_attn.q_proj`, and with its endings, such as `q_proj`.

    Raises:
        ValueError: if a pattern names nothing, or some layers only, or the rank is too large.
    """
    shapes = projections(config)
    for target in targets:
        if not any(_named(target, module, i) for module in shapes for i in _layers(config)):
            raise ValueError(
                f"targets: {target!r} matches no linear projection of the model; they are "
                f"{', '.join(f'model.layers.N.{module}' for module in shapes)}, and a pattern may "
                "give the end of a name, such as q_proj or self_attn.*"
            )
    modules = []
    for module in shapes:
        has = [any(_named(target, module, i) for target in targets) for i in _layers(config)]
        if any(has) and not all(has):
            raise ValueError(
                f"targets match {module} in layer {has.index(True)} but not in layer "
                f"{has.index(False)}: an adapter is in every layer or in none, so leave the number "
                f"of the layer open, as in model.layers.*.{module}"
            )
        if all(has):
            modules.append(module)
    made = AdapterShape(rank=rank, alpha=alpha, modules=tuple(modules))
    check_rank(made, config)
    return made


def check_rank(shape: AdapterShape, config: ModelConfig) -> None:
    """Raises ValueError if a matrix has no room for the rank."""
    shapes = projections(config)
    smallest = min(shape.modules, key=lambda module: min(shapes[module]))
    if shape.rank > min(shapes[smallest]):
        raise ValueError(
            f"rank={shape.rank} is larger than {smallest} allows, which is {list(shapes[smallest])}"
            f": set it to {min(shapes[smallest])} or less"
        )


def _layers(config: ModelConfig) -> range:
    return range(config.num_layers)


def _named(target: str, module: str, layer: int) -> bool:
    name = f"model.layers.{layer}.{module}"
    return fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name, f"*.{target}")


def adapter_parameters(shape: AdapterShape, config: ModelConfig) -> int:
    """How many parameters the adapter has."""
    sizes = projections(config)
    return config.num_layers * shape.rank * sum(sum(sizes[module]) for module in shape.modules)


def abstract_adapter(shape: AdapterShape, config: ModelConfig) -> Params:
    """Shapes and dtypes of `init_adapter`, without allocating anything."""
    sizes, L = projections(config), config.num_layers
    struct = lambda *size: jax.ShapeDtypeStruct((L, *size), np.float32)
    return adapter_tree(
        {
            module: {
                LORA_A: struct(shape.rank, sizes[module][1]),
                LORA_B: struct(sizes[module][0], shape.rank),
            }
            for module in shape.modules
        }
    )


def init_adapter(shape: AdapterShape, config: ModelConfig, seed: int) -> Params:
    """A fresh adapter, float32 on the host with stacked layers, under which nothing changes yet.

    A is uniform within +-1 / sqrt(in), and B is 0, as in PEFT.
    """
    sizes = projections(config)
    random = np.random.default_rng([seed, shape.rank])
    leaves = {}
    for module in shape.modules:
        out, width = sizes[module]
        bound = width**-0.5
        a_LrI = random.uniform(-bound, bound, (config.num_layers, shape.rank, width))
        leaves[module] = {
            LORA_A: a_LrI.astype(np.float32),
            LORA_B: np.zeros((config.num_layers, out, shape.rank), np.float32),
        }
    return adapter_tree(leaves)


def adapter_tree(leaves: Mapping[str, Mapping[str, Any]]) -> Params:
    """The tree of an adapter with stacked layers.

    Args:
        leaves: A and B by module.
    """
    layers: dict[str, Any] = {}
    for module, pair in leaves.items():
        part, name = module.split(".")
        layers.setdefault(part, {})[name] = dict(pair)
    return {LAYERS: layers}


def adapter_leaves(adapter: Params) -> dict[str, Mapping[str, Any]]:
    """A and B by module: the inverse of `adapter_tree`."""
    return {
        f"{part}.{name}": pair
        for part, tree in adapter[LAYERS].items()
        for name, pair in tree.items()
    }


def join(base: Any, adapter: Any) -> Any:
    """One tree of both; no leaf is copied.

    Args:
        base, adapter: trees of arrays, of shapes or of specs, with layers stacked or listed in
            both. Leaves of their own other than the adapter's, such as a value head, stay.
    """
    if isinstance(base, list):
        return [join(*both) for both in zip(base, adapter, strict=True)]
    joined = {**base}
    for name, tree in adapter.items():
        joined[name] = join(base[name], tree) if name in base else tree
    return joined


def merge(params: Params, scale: float) -> Params:
    """Full weights of joined parameters: W + scale B A, in float32 where there is an adapter.

    Args:
        params: numpy or jax arrays, layers stacked or listed.
    """

    def merged(leaves):
        weight, a, b = (leaves[name].astype(np.float32) for name in ("weight", LORA_A, LORA_B))
        return {**_own(leaves), "weight": weight + scale * (b @ a)}

    return _with_modules(params, merged)


def has_adapter(params: Params) -> bool:
    """Whether any layer has one."""
    paths = jax.tree_util.tree_flatten_with_path(params[LAYERS])[0]
    return any(path[-1].key == LORA_A for path, _ in paths)


def with_strong_adapter(layer: Params, strength: float) -> Params:
    """A layer whose adapters all matter: each B, where it is not 0, is scaled to a root mean square
    of strength / sqrt(rank), which A x of unit size turns into changes of about the strength.

    Args:
        layer: joined parameters of one layer, whole on this device.
    """

    def scaled(leaves):
        b = leaves[LORA_B].astype(jnp.float32)
        rms = jnp.sqrt(jnp.mean(b * b))
        factor = strength * b.shape[-1] ** -0.5 / jnp.maximum(rms, _SMALLEST_RMS)
        return {**leaves, LORA_B: (factor * b).astype(leaves[LORA_B].dtype)}

    return _with_modules(layer, scaled)


def adapter_of(params: Params) -> Params:
    """The adapter alone, of joined parameters with layers listed."""
    return {LAYERS: [_matrices(layer) for layer in params[LAYERS]]}


def _matrices(tree: Any) -> Any:
    kept = {name: leaf for name, leaf in tree.items() if name in (LORA_A, LORA_B)}
    inner = {name: _matrices(each) for name, each in tree.items() if isinstance(each, Mapping)}
    return kept | {name: each for name, each in inner.items() if each}


def digest_tensor(digest: str) -> np.ndarray:
    """The tensor BASE_DIGEST of a digest, hex."""
    return np.frombuffer(bytes.fromhex(digest), np.uint8).copy()


def _own(leaves: Params) -> Params:
    return {name: leaf for name, leaf in leaves.items() if name not in (LORA_A, LORA_B)}


def _with_modules(tree: Any, change: Callable[[Params], Params]) -> Any:
    """The tree with every module changed that has an adapter."""
    if isinstance(tree, list):
        return [_with_modules(each, change) for each in tree]
    if not isinstance(tree, Mapping):
        return tree
    if LORA_A in tree:
        return change({**tree})
    return {name: _with_modules(each, change) for name, each in tree.items()}


def adapter_shapes(shape: AdapterShape, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every matrix of the adapter, layer by layer, named as in the model:
    `model.layers.0.self_attn.q_proj.lora_A.weight`.
    """
    sizes, named = projections(config), {}
    for i in _layers(config):
        for module in shape.modules:
            out, width = sizes[module]
            named[adapter_name(i, module, LORA_A)] = (shape.rank, width)
            named[adapter_name(i, module, LORA_B)] = (out, shape.rank)
    return named


def adapter_name(layer: int, module: str, matrix: str) -> str:
    """The name of one matrix of an adapter."""
    return f"model.layers.{layer}.{module}.{matrix}.weight"


def to_named_adapter(adapter: Params) -> dict[str, Any]:
    """The matrices of an adapter by name, layers stacked or listed; numpy leaves become views."""
    layers = adapter[LAYERS]
    if not isinstance(layers, list):
        pairs = adapter_leaves(adapter)
        count = len(jax.tree.leaves(layers)[0])
        return {
            adapter_name(i, module, matrix): pair[matrix][i]
            for i in range(count)
            for module, pair in pairs.items()
            for matrix in (LORA_A, LORA_B)
        }
    return {
        adapter_name(i, module, matrix): pair[matrix]
        for i, layer in enumerate(layers)
        for module, pair in adapter_leaves({LAYERS: layer}).items()
        for matrix in (LORA_A, LORA_B)
    }


def from_named_adapter(
    named: Mapping[str, Any], shape: AdapterShape, config: ModelConfig, *, stacked: bool
) -> Params:
    """The tree of named matrices: the inverse of `to_named_adapter`.

    Args:
        stacked: whether layers become one tree of float32 numpy arrays with a leading layer axis,
            or a list of trees with the arrays themselves.

    Raises:
        ValueError: naming what is missing, extra or of the wrong shape.
    """
    expected = adapter_shapes(shape, config)
    _complain("lack", [name for name in expected if name not in named])
    _complain("have, beyond the adapter,", [name for name in named if name not in expected])
    wrong = [
        f"{name} {list(named[name].shape)} instead of {list(size)}"
        for name, size in expected.items()
        if tuple(named[name].shape) != size
    ]
    _complain("have matrices of the wrong shape:", wrong)

    def leaves_of(layer):
        return {
            module: {m: named[adapter_name(layer, module, m)] for m in (LORA_A, LORA_B)}
            for module in shape.modules
        }

    each = [adapter_tree(leaves_of(i))[LAYERS] for i in _layers(config)]
    if not stacked:
        return {LAYERS: each}
    stack = lambda *leaves: np.stack([np.asarray(leaf, np.float32) for leaf in leaves])
    return {LAYERS: jax.tree.map(stack, *each)}


def _complain(what: str, items: Sequence[str]) -> None:
    if items:
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        raise ValueError(f"the adapter's matrices {what} {', '.join(items[:_SHOWN])}{more}")
