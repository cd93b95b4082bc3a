"""`packed_attention` with the implementation chosen by an argument, and the rule that chooses it.

Dimension key: that of reference.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels import choose
from kernels.packed_attention import pallas_tpu, reference, xla

__all__ = ["AttentionPlan", "packed_attention", "plan_attention"]

OPERAND_DTYPES = (jnp.bfloat16, jnp.float32)
WHOLE_TOKENS = {"cpu": 64, "gpu": 2048, "tpu": 512}
"""Of a row, up to which `auto` keeps its scores whole. Measured on a CPU, where blocks take as
long in rows of 64 tokens and three quarters of the time in rows of 128. On a GPU, which starts
every step of a loop by itself, and on a TPU, whose kernel is made for large blocks, it is what
takes little memory whole, and is not measured."""


class AttentionPlan(NamedTuple):
    """Which implementation attends in rows of which length."""

    impl: str
    """One of `kernels.choose.IMPLEMENTATIONS`."""
    whole_tokens: int = 0
    """Rows of at most so many tokens have their scores whole, by the reference."""

    def impl_for(self, row_tokens: int, queries: int | None = None) -> str:
        """The implementation for rows of a length.

        Args:
            queries: of each row, where they are a part of it: with few of them a longer row has no
                more scores, and blocks of few queries take many steps. None for all tokens.
        """
        scores = row_tokens * (row_tokens if queries is None else queries)
        return choose.REFERENCE if scores <= self.whole_tokens**2 else self.impl

    def __str__(self):
        if not self.whole_tokens:
            return self.impl
        return f"{self.impl}, and {choose.REFERENCE} for rows of up to {self.whole_tokens} tokens"


WHOLE_SCORES = AttentionPlan(choose.REFERENCE)


def plan_attention(choice: str, platform: str) -> AttentionPlan:
    """What a choice means on a platform; `auto` keeps the scores of short rows whole.

    Args:
        choice: one of `kernels.choose.CHOICES`.
        platform: of the devices that will run it.

    Raises:
        ValueError: as choose.resolve does.
    """
    impl = choose.resolve(choice, platform)
    return AttentionPlan(impl, WHOLE_TOKENS.get(platform, 0) if choice == "auto" else 0)


def packed_attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    segment_BS: jax.Array,
    *,
    operand_dtype: jax.typing.DTypeLike,
    window: int | None = None,
    soft_cap: float | None = None,
    start_C: jax.Array | None = None,
    impl: str = choose.XLA,
) -> jax.Array:
    """Same contract as reference.packed_attention, with its arguments checked.

    On a mesh it stands inside `shard_map`: rows and key/value heads, with their query heads, may be
    cut over any axes, since none of them depends on another. Where the tokens of a row are cut,
    keys, values and segments are gathered, and `start_C` says which queries a device has.

    Args:
        operand_dtype: bfloat16 or float32.
        impl: one of `kernels.choose.IMPLEMENTATIONS`.

    Raises:
        ValueError: if shapes, dtypes or options do not fit, with the numbers.
    """
    _check_arrays(query_BTNH, key_BSKH, value_BSKH, segment_BS, start_C)
    if jnp.dtype(operand_dtype) not in OPERAND_DTYPES:
        raise ValueError(
            f"operand_dtype must be bfloat16 or float32, got {jnp.dtype(operand_dtype)}"
        )
    if window is not None and (isinstance(window, bool) or window != int(window) or window < 1):
        raise ValueError(f"window must be None or a whole number of at least 1, got {window!r}")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap must be None or finite and above 0, got {soft_cap!r}")
    return _implementation(impl)(
        query_BTNH,
        key_BSKH,
        value_BSKH,
        segment_BS,
        operand_dtype=operand_dtype,
        window=None if window is None else int(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        start_C=start_C,
    )


def _implementation(impl: str):
    if impl == choose.REFERENCE:
        return reference.packed_attention
    if impl == choose.XLA:
        return xla.packed_attention
    if impl == choose.PALLAS_TPU:
        return pallas_tpu.packed_attention
    if impl == choose.PALLAS_INTERPRET:
        return functools.partial(pallas_tpu.packed_attention, interpret=True)
    raise ValueError(f"impl must be one of {choose.IMPLEMENTATIONS}, got {impl!r}")


def _check_arrays(query_BTNH, key_BSKH, value_BSKH, segment_BS, start_C):
    """Refuses arrays that do not belong together, with their shapes."""
    for name, array in (("query", query_BTNH), ("key", key_BSKH), ("value", value_BSKH)):
        if array.ndim != 4 or min(array.shape) < 1:
            raise ValueError(f"{name} must be [B, T, heads, H], none of them 0, got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {array.dtype}")
    B, T, N, H = query_BTNH.shape
    S, K = key_BSKH.shape[1:3]
    S = T if start_C is None else S
    if key_BSKH.shape != (B, S, K, H) or value_BSKH.shape != key_BSKH.shape or N % K:
        raise ValueError(
            f"key and value must be [B, T, K, H] = [{B}, {S}, a divisor of {N}, {H}] alike for a "
            f"query of {query_BTNH.shape}, got {key_BSKH.shape} and {value_BSKH.shape}"
        )
    if segment_BS.shape != (B, S) or not jnp.issubdtype(segment_BS.dtype, jnp.integer):
        raise ValueError(
            f"segment must be integers of shape {(B, S)}, got {segment_BS.dtype} {segment_BS.shape}"
        )
    if start_C is None:
        return
    if start_C.ndim != 1 or not jnp.issubdtype(start_C.dtype, jnp.integer):
        raise ValueError(
            f"start must be integers of shape (C,), got {start_C.dtype} {start_C.shape}"
        )
    if not len(start_C) or T % len(start_C) or T > S:
        raise ValueError(
            f"{T} queries must be {len(start_C)} chunks of equal length, of at least one, in a "
            f"row of {S} tokens"
        )
