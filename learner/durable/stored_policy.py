"""Reads the policy of a checkpoint, whoever may be writing others beside it.

Nothing is changed, and no device is needed. The optimiser's state is not read.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from learner.durable.checkpoint import BEST, complete_steps
from learner.durable.checkpoint_manifest import DamagedCheckpoint, verify_checkpoint
from models.adapter import AdapterShape, abstract_adapter
from models.config import ModelConfig
from models.transformer import Params, abstract_params


class NoSuchCheckpoint(ValueError):
    """The run has no complete checkpoint, or none of the step asked for."""


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose files were all found whole."""

    step: int
    folder: pathlib.Path
    tree: Mapping[str, list]
    """Dtype and shape of every leaf, by its path."""


def kept_steps(checkpoints: pathlib.Path) -> dict[int, pathlib.Path]:
    """Folder of each complete checkpoint by step, newest first, the best one among them."""
    found = {
        step: folder / f"step-{step:08d}"
        for folder in (checkpoints / BEST, checkpoints)
        for step in complete_steps(folder)
    }
    return dict(sorted(found.items(), reverse=True))


def find_checkpoint(checkpoints: pathlib.Path, step: int | None = None) -> StoredCheckpoint:
    """The checkpoint of a step, or the newest that is whole; every file of it is read.

    Raises:
        NoSuchCheckpoint: naming the steps that there are.
        DamagedCheckpoint: if the one asked for, or each that there is, is not whole.
    """
    kept = kept_steps(checkpoints)
    if not kept:
        raise NoSuchCheckpoint(f"{checkpoints} has no complete checkpoint yet")
    if step is not None and step not in kept:
        there = ", ".join(map(str, kept))
        raise NoSuchCheckpoint(f"{checkpoints} has no checkpoint of step {step}; it has {there}")
    reasons = []
    for candidate in kept if step is None else [step]:
        try:
            manifest = verify_checkpoint(kept[candidate])
        except DamagedCheckpoint as error:
            reasons.append(str(error))
        else:
            return StoredCheckpoint(candidate, kept[candidate], manifest["tree"])
    raise DamagedCheckpoint("; ".join(reasons))


def read_policy(
    stored: StoredCheckpoint, config: ModelConfig, adapter: AdapterShape | None = None
) -> Params:
    """The weights of a checkpoint, without those of a critic: float32 on the host, layers stacked.

    Args:
        adapter: that has trained in place of the model, if one has; it is all that is read.

    Raises:
        ValueError: if they are of another model.
    """
    wanted = abstract_params(config) if adapter is None else abstract_adapter(adapter, config)
    for path, leaf in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        name = f".params{jax.tree_util.keystr(path)}"
        if stored.tree.get(name, [None])[1:] != [*leaf.shape]:
            raise ValueError(
                f"{stored.folder} is of another model: {name} is {stored.tree.get(name)}, and "
                f"the model has {[*leaf.shape]}"
            )
    return _restore(stored.folder / "state", {"params": wanted})["params"]


def _restore(folder: pathlib.Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The leaves of a tree, as numpy arrays, of all that a folder of Orbax has."""
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy, partial_restore=True),
        )
