"""One row over several devices: which chunks of it a device has, and how its queries see the rest.

With `context` N a row is cut into 2N equal chunks, and device i has the chunks i and 2N-1-i: one
with few tokens before it and one with many, so that causal attention is the same work for all. A
micro-batch is put into that order once, where it enters the mesh, and what comes back of each token
is put into the order of the row again. Between them nothing depends on the order but attention,
which gathers the keys and values of whole rows and attends with the queries that it has. The
transpose of the gather adds up the gradients of keys and values over the axis and leaves each
device with those of its own tokens (reduce-scatter).

Dimension key:
    B: rows of one micro-batch, on a device its own
    T: token slots of a row, on a device its own
    S: token slots of a whole row
    N: devices of the axis
    C: chunks of a device, 2
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels.packed_attention.ops import AttentionPlan, packed_attention
from learner.update.mesh import CONTEXT
from models.transformer import Attend, packed_attend


def spread(tree: Any, mesh: Mesh) -> Any:
    """Arrays [B, S, ..] of whole rows, their chunks in the order in which the devices have them.

    Raises:
        ValueError: if they cannot be cut, with the numbers.
    """
    N = mesh.shape[CONTEXT]

    def spread_rows(array_BS):
        B, S, *rest = array_BS.shape
        if S % (2 * N):
            raise ValueError(f"rows of {S} tokens cannot be cut into 2 x {N} equal chunks")
        chunks = array_BS.reshape(B, 2, N, S // (2 * N), *rest)
        both = jnp.stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2)
        return both.reshape(array_BS.shape)

    return tree if N == 1 else jax.tree.map(spread_rows, tree)


def in_order(array_BS: jax.Array, mesh: Mesh) -> jax.Array:
    """The inverse of `spread` for one array [B, S, ..]."""
    N = mesh.shape[CONTEXT]
    if N == 1:
        return array_BS
    B, S, *rest = array_BS.shape
    chunks = array_BS.reshape(B, N, 2, S // (2 * N), *rest)
    both = jnp.stack([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1)
    return both.reshape(array_BS.shape)


def row_attend(
    segment_BT: jax.Array, mesh: Mesh, *, operand_dtype: jnp.dtype, plan: AttentionPlan
) -> Attend:
    """`packed_attend` inside `shard_map` over the mesh, of the tokens that this device has."""
    N = mesh.shape[CONTEXT]
    if N == 1:
        return packed_attend(segment_BT, operand_dtype=operand_dtype, plan=plan)

    def whole_rows(array_BT):
        return in_order(jax.lax.all_gather(array_BT, CONTEXT, axis=1, tiled=True), mesh)

    segment_BS = whole_rows(segment_BT)
    impl = plan.impl_for(segment_BS.shape[1])
    early = jax.lax.axis_index(CONTEXT)
    start_C = jnp.stack([early, 2 * N - 1 - early]) * (segment_BT.shape[1] // 2)

    def attend(query, key, value, layer_cache):
        out = packed_attention(
            query,
            whole_rows(key),
            whole_rows(value),
            segment_BS,
            start_C=start_C,
            operand_dtype=operand_dtype,
            impl=impl,
        )
        return out, layer_cache

    return attend
