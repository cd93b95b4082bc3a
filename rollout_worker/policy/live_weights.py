"""How a published version becomes the weights that a worker samples with, and their digest.

A version is a whole model, or an adapter of one that the worker has loaded once. An adapter is not
merged: rounded to the dtype of the copy, W + s B A would lose most of what a step changes, and
sampling would differ from the learner's forward pass (docs/lora.md).
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import ml_dtypes
import numpy as np

from models.adapter import BASE_DIGEST, digest_tensor, join
from models.files.checkpoint import expected_shapes, from_named
from models.transformer import Params
from rollout_worker.engine.layout import Layout
from services.weights.digest import tree_digest, wire_dtype

Named = Mapping[str, np.ndarray | jax.Array]
"""Published tensors by name, on the host; beside the learner on its devices."""


class WeightDigestMismatch(RuntimeError):
    """The arrays on the device are not the published ones."""


class LiveWeights(Protocol):
    """What a worker needs of either kind of version."""

    def place(self, named: Named) -> Params:
        """Puts a version on the devices, as the engine takes it.

        Raises:
            ValueError: if tensors are missing, extra or wrongly shaped.
            WeightDigestMismatch: if it belongs to another base.
        """
        ...

    def digest(self, params: Params, named: Named) -> str:
        """The digest of a version, from the arrays that `place` put on the devices.

        Args:
            named: the version; only dtypes are read.
        """
        ...


class WholeModel:
    """Versions that are whole models."""

    def __init__(self, layout: Layout):
        self._layout = layout

    def place(self, named: Named) -> Params:
        """As LiveWeights has it."""
        tree = from_named(named, self._layout.published, stacked=False)
        return jax.block_until_ready(self._layout.to_inference(tree))

    def digest(self, params: Params, named: Named) -> str:
        """As LiveWeights has it."""
        return tree_digest(self._layout.from_inference(params, _dtypes(named)))[1]


class AdapterOnBase:
    """Versions that are adapters of one model, which stays on the devices."""

    def __init__(self, layout: Layout, base: Params, *, base_dtype: str, weights_dtype: str):
        """Args:
        layout: with the shape of the adapter.
        base: host arrays of the model, as stored.
        base_dtype: in which the learner holds it, if it is stored in a wider one.
        weights_dtype: of the published versions.
        """
        if "bfloat16" in (base_dtype, weights_dtype):
            base = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16, copy=False), base)
        self._layout = layout
        self._base = jax.block_until_ready(layout.to_inference(base))
        dtypes = dict.fromkeys(expected_shapes(layout.published), wire_dtype(weights_dtype))
        self._base_digest = tree_digest(layout.from_inference(self._base, dtypes))[1]
        """Of the live arrays; no other code changes them."""

    def place(self, named: Named) -> Params:
        """As LiveWeights has it."""
        matrices = dict(named)
        wanted = matrices.pop(BASE_DIGEST, None)
        if wanted is None:
            raise ValueError("the learner publishes whole models, not adapters: is it of this run?")
        published = np.asarray(wanted).tobytes().hex()
        if published != self._base_digest:
            raise WeightDigestMismatch(
                f"the adapter belongs to a model with digest {published[:12]}, the one at "
                f"model.path here has {self._base_digest[:12]}: copy its files from the learner's "
                "host to this one"
            )
        adapter = jax.block_until_ready(self._layout.adapter_to_inference(matrices))
        return join(self._base, adapter)

    def digest(self, params: Params, named: Named) -> str:
        """As LiveWeights has it."""
        dtypes = _dtypes({name: leaf for name, leaf in named.items() if name != BASE_DIGEST})
        views = self._layout.adapter_from_inference(params, dtypes)
        return tree_digest({**views, BASE_DIGEST: digest_tensor(self._base_digest)})[1]


def _dtypes(named: Named) -> dict[str, np.dtype]:
    return {name: np.dtype(array.dtype) for name, array in named.items()}
