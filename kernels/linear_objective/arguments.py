"""What the head's operations refuse: arrays and objectives that do not belong together.

All of it is known while a program is traced, and costs nothing when it runs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels.linear_objective.reference import Objective


def check_arrays(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    data: Any = None,
) -> None:
    """Refuses arrays that do not belong together.

    Raises:
        ValueError: with the shapes and the rule.
    """
    for name, array in (("hidden", hidden_TD), ("head", head_VD)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {array.dtype}")
    if hidden_TD.ndim != 2 or head_VD.ndim != 2 or head_VD.shape[1] != hidden_TD.shape[1]:
        raise ValueError(
            f"hidden must be [T, D] and head [V, D] of the same width D, got {hidden_TD.shape} "
            f"and {head_VD.shape}"
        )
    T = hidden_TD.shape[0]
    if T == 0:
        raise ValueError(f"hidden must hold at least 1 token, got {hidden_TD.shape}")
    if ids_T.shape != (T,) or not jnp.issubdtype(ids_T.dtype, jnp.integer):
        raise ValueError(f"ids must be integers of shape {(T,)}, got {ids_T.dtype} {ids_T.shape}")
    if active_T is not None and (active_T.shape != (T,) or active_T.dtype != jnp.bool_):
        raise ValueError(
            f"active must be bool of shape {(T,)}, got {active_T.dtype} {active_T.shape}"
        )
    for leaf in jax.tree.leaves(data):
        if jnp.shape(leaf)[:1] != (T,):
            raise ValueError(f"leaves of data must have T={T} as first axis, got {jnp.shape(leaf)}")


def check_objective(objective: Objective, data: Any) -> None:
    """Refuses an objective that does not give one number for each token.

    Raises:
        ValueError: with the shape that it gives. One that averages over its tokens, say, would
            have a gradient that depends on the size of the chunks.
    """
    N = jax.tree.leaves(data)[0].shape[0] if jax.tree.leaves(data) else 2
    per_token = jax.ShapeDtypeStruct((N,), jnp.float32)
    found = jax.eval_shape(objective, per_token, per_token, data)
    if getattr(found, "shape", None) != (N,) or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(
            f"the objective must give one float for each of its tokens, here shape {(N,)}; it "
            f"gives {found}"
        )
