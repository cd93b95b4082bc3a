"""`decode_attention` as XLA fuses it on every platform.

The write is `dynamic_update_slice` under vmap. A slice per row, or an index for the row beside that
for the column (`.at[rows, :, positions]`), makes XLA:TPU copy a wide cache to transpose it, and a
select over S rewrites all of it everywhere. A bfloat16 cache on a CPU is the exception: XLA:CPU
converts all of it to float32 and back around any write, so keep a CPU's cache in float32.

Dimension key: that of reference.py.
"""

import jax
import jax.numpy as jnp

from kernels.decode_attention.reference import Attended

HIDDEN_SCORE = -1e30
"""Finite: a difference of two is no NaN."""


def precision_of(operand_dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """That of a product of such operands: float32 is not to be cut to bfloat16 or tf32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(operand_dtype) == jnp.float32 else None


def decode_attention(
    query_BNH: jax.Array,
    new_key_BKH: jax.Array,
    new_value_BKH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    position_B: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
) -> Attended:
    """Same contract as reference.decode_attention; softmax weights are rounded unnormalised."""
    B, N, H = query_BNH.shape
    _, K, S, _ = key_BKSH.shape
    key_BKSH = _write(key_BKSH, new_key_BKH, position_B)
    value_BKSH = _write(value_BKSH, new_value_BKH, position_B)
    score_BKGS = jnp.einsum(
        "bkgh,bksh->bkgs",
        query_BNH.reshape(B, K, N // K, H).astype(operand_dtype),
        key_BKSH.astype(operand_dtype),
        precision=precision_of(operand_dtype),
        preferred_element_type=jnp.float32,
    )
    seen_BS = jnp.arange(S) <= position_B[:, None]
    score_BKGS = jnp.where(seen_BS[:, None, None], score_BKGS * H**-0.5, HIDDEN_SCORE)
    weight_BKGS = jnp.exp(score_BKGS - score_BKGS.max(axis=-1, keepdims=True))
    out_BKGH = jnp.einsum(
        "bkgs,bksh->bkgh",
        weight_BKGS.astype(operand_dtype),
        value_BKSH.astype(operand_dtype),
        precision=precision_of(operand_dtype),
        preferred_element_type=jnp.float32,
    )
    out_BKGH = out_BKGH / weight_BKGS.sum(axis=-1)[..., None]
    return Attended(out_BKGH.reshape(B, N, H).astype(query_BNH.dtype), key_BKSH, value_BKSH)


def _write(cache_BKSH, new_BKH, position_B):
    """The cache with each row's new column in its place."""
    one = lambda row_KSH, new_KH, position: jax.lax.dynamic_update_slice_in_dim(
        row_KSH, new_KH[:, None], position, axis=1
    )
    return jax.vmap(one)(cache_BKSH, new_BKH.astype(cache_BKSH.dtype), position_B)
