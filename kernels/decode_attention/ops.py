"""`decode_attention` with the implementation chosen by an argument, on one device or a mesh.

Dimension key: that of reference.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from kernels import choose
from kernels.decode_attention import pallas_tpu, pieces, reference, xla
from kernels.decode_attention.reference import Attended

__all__ = ["Attended", "decode_attention", "resolve"]

CACHE_DTYPES = (jnp.bfloat16, jnp.float32)


def resolve(choice: str, platform: str, *, head_size: int) -> str:
    """As kernels.choose.resolve, with `auto` on a TPU only where the kernel takes the head size."""
    impl = choose.resolve(choice, platform)
    if choice == "auto" and impl == choose.PALLAS_TPU and head_size % pieces.LANES:
        return choose.XLA
    return impl


def decode_attention(
    query_BNH: jax.Array,
    new_key_BKH: jax.Array,
    new_value_BKH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    position_B: jax.Array,
    *,
    leader_B: jax.Array | None = None,
    shared_B: jax.Array | None = None,
    impl: str = choose.XLA,
    operand_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    mesh: Mesh | None = None,
    rows_axis: str | None = None,
    heads_axis: str | None = None,
) -> Attended:
    """Same contract as reference.decode_attention, with its arguments checked.

    Inside a loop that carries the caches, or where they are donated, the write is in place.

    Args:
        leader_B: integers in [0, B), beside `shared_B`: a row whose first columns hold the same
            keys and values as this one's. All rows with the same leader share equally many; the
            leader names itself, as does a row that shares nothing. Within `shard_map`, and along
            `rows_axis`, rows are counted from the first of this device's part. The result is the
            same within rounding, but the TPU kernel reads what rows share once for all of them;
            other implementations ignore it. The work lists that the kernel derives are the same
            for all layers of a step, and XLA makes them once where the arrays are.
        shared_B: integers: how many columns, none of them behind the position. Rows without a
            leader have 0.
        impl: one of `kernels.choose.IMPLEMENTATIONS`.
        operand_dtype: bfloat16 or float32.
        mesh: given where the call stands outside `shard_map`. Without it the axes named below are
            those of the surrounding mesh that an outer `shard_map` has left to the compiler, and
            the arrays are this device's part along the others. All that it has left must be named,
            those of one device too: XLA refuses to cut a TPU kernel by itself.
        rows_axis: mesh axis over which B is cut, in equal parts.
        heads_axis: mesh axis over which N and K are cut, in equal parts.

    Raises:
        ValueError: if shapes, dtypes, implementation or mesh do not fit, with the numbers; what the
            TPU kernel takes is in pallas_tpu.py.
    """
    arrays = (query_BNH, new_key_BKH, new_value_BKH, key_BKSH, value_BKSH, position_B)
    _check_arrays(*arrays)
    prefixes = _check_prefixes(leader_B, shared_B, position_B)
    if jnp.dtype(operand_dtype) not in CACHE_DTYPES:
        raise ValueError(
            f"operand_dtype must be bfloat16 or float32, got {jnp.dtype(operand_dtype)}"
        )
    implementation = functools.partial(_implementation(impl), operand_dtype=operand_dtype)
    if impl not in (choose.PALLAS_TPU, choose.PALLAS_INTERPRET):
        prefixes = {}

    def run(arrays, prefixes):
        return implementation(*arrays, **prefixes)

    if rows_axis is None and heads_axis is None:
        return run(arrays, prefixes)
    named = {axis for axis in (rows_axis, heads_axis) if axis is not None}
    around = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    B, K = key_BKSH.shape[:2]
    _check_cut(around, "rows", B, rows_axis)
    _check_cut(around, "key/value heads", K, heads_axis)
    heads = P(rows_axis, heads_axis)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=((*[heads] * 5, P(rows_axis)), P(rows_axis)),
        out_specs=heads,
        axis_names=named if mesh is None else set(mesh.axis_names),
        check_vma=False,  # a Pallas call says nothing of what varies over which axis
    )(arrays, prefixes)


def _implementation(impl: str):
    if impl == choose.REFERENCE:
        return reference.decode_attention
    if impl == choose.XLA:
        return xla.decode_attention
    if impl == choose.PALLAS_TPU:
        return pallas_tpu.decode_attention
    if impl == choose.PALLAS_INTERPRET:
        # Chains hide no waits here, and each takes its time to compile.
        return functools.partial(pallas_tpu.decode_attention, chains=2, interpret=True)
    raise ValueError(f"impl must be one of {choose.IMPLEMENTATIONS}, got {impl!r}")


def _check_arrays(query_BNH, new_key_BKH, new_value_BKH, key_BKSH, value_BKSH, position_B):
    """Refuses arrays that do not belong together, with their shapes."""
    if key_BKSH.ndim != 4 or value_BKSH.shape != key_BKSH.shape:
        raise ValueError(
            f"key and value caches must be [B, K, S, H] alike, got {key_BKSH.shape} and "
            f"{value_BKSH.shape}"
        )
    B, K, _, H = key_BKSH.shape
    if min(key_BKSH.shape) < 1:
        raise ValueError(f"the caches must hold something, got [B, K, S, H] = {key_BKSH.shape}")
    if key_BKSH.dtype != value_BKSH.dtype or key_BKSH.dtype not in CACHE_DTYPES:
        raise ValueError(
            "key and value caches must both be bfloat16 or both float32, got "
            f"{key_BKSH.dtype} and {value_BKSH.dtype}"
        )
    for name, new in (("key", new_key_BKH), ("value", new_value_BKH)):
        if new.shape != (B, K, H) or not jnp.issubdtype(new.dtype, jnp.floating):
            raise ValueError(
                f"the new {name} must be floating point [B, K, H] = {(B, K, H)} for a cache of "
                f"{key_BKSH.shape}, got {new.dtype} {new.shape}"
            )
    N = query_BNH.shape[1] if query_BNH.ndim == 3 else 0
    if query_BNH.shape != (B, N, H) or N < 1 or N % K:
        raise ValueError(
            f"query must be [B, N, H] = [{B}, a multiple of {K}, {H}] for a cache of "
            f"{key_BKSH.shape}, got {query_BNH.shape}"
        )
    if not jnp.issubdtype(query_BNH.dtype, jnp.floating):
        raise ValueError(f"query must be floating point, got {query_BNH.dtype}")
    if position_B.shape != (B,) or not jnp.issubdtype(position_B.dtype, jnp.integer):
        raise ValueError(
            f"position must be integers of shape {(B,)}, got {position_B.dtype} {position_B.shape}"
        )


def _check_prefixes(leader_B, shared_B, position_B) -> dict[str, jax.Array]:
    """Both by name, or nothing; refuses one without the other and what has not a number a row."""
    if leader_B is None and shared_B is None:
        return {}
    if leader_B is None or shared_B is None:
        raise ValueError("leader and shared columns are given together or not at all")
    for name, array in (("leader", leader_B), ("shared", shared_B)):
        if array.shape != position_B.shape or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be integers of shape {position_B.shape}, got {array.dtype} "
                f"{array.shape}"
            )
    return {"leader_B": leader_B, "shared_B": shared_B}


def _check_cut(mesh: Mesh | AbstractMesh, what: str, size: int, axis: str | None) -> None:
    """Refuses a size that a mesh axis cannot cut into equal parts, with both."""
    if axis is None:
        return
    if axis not in mesh.shape:
        raise ValueError(f"{axis!r} is not among the mesh axes {tuple(mesh.axis_names)}")
    if size % mesh.shape[axis]:
        raise ValueError(
            f"{size} {what} cannot be cut into {mesh.shape[axis]} equal parts over {axis!r}"
        )
