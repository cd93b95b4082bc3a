"""How Orbax writes a state: from the devices, sharded as it lies, or from a copy on the host."""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

_CHUNK_BYTES = 64 * 2**20
"""Of the pieces of an array on the host, so that a device reads little more than its own part."""


def write_state(folder: pathlib.Path, state: dict[str, Any], record: dict[str, Any]) -> None:
    """Writes `state` and `record` as items of a new folder, and returns once they are there.

    Args:
        state: arrays by name, all on the devices or all on the host. The latter are not copied
            again, so no thread may change them meanwhile.
        record: JSON values.
    """
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state)):
        registry = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
            (jax.Array, ocp.type_handlers.ArrayHandler()),
        )
        handler = ocp.CompositeCheckpointHandler(
            state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            record=ocp.JsonCheckpointHandler(),
        )
        pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), state)
        arrays = ocp.args.PyTreeSave(state, save_args=pieces)
    else:
        handler = ocp.CompositeCheckpointHandler()
        arrays = ocp.args.StandardSave(state)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            folder, args=ocp.args.Composite(state=arrays, record=ocp.args.JsonSave(record))
        )
