"""Tokens in chunks of one size, those that are not active left out.

Shapes are static, the number of active tokens is not: the active ones are moved to the front, and
only so many chunks are visited as hold one. The empty places of the last chunk repeat its last
token, so that whatever a chunk holds is a real token.

Dimension key:
    T: tokens
    N: token places in all chunks, at least T
    C: tokens of one chunk
"""

from typing import Any

import jax
import jax.numpy as jnp


def even_size(T: int, at_most: int, multiple: int) -> int:
    """Tokens of each chunk of T, evened out over as few chunks as the bound allows.

    They are a multiple of `multiple`, as far as the bound allows that.
    """
    chunks = -(-T // at_most)
    return min(at_most, T, -(-T // chunks // multiple) * multiple)


class Chunks:
    """Arrays of the active tokens, to be read and written a chunk at a time."""

    def __init__(self, arrays: Any, active_T: jax.Array | None, size: int):
        """
        Args:
            arrays: pytree of arrays [T, ..].
            active_T: bool [T], or None where all are.
            size: C, at most T; see `even_size`.
        """
        T = jax.tree.leaves(arrays)[0].shape[0]
        self._C = size
        self._N = -(-T // self._C) * self._C
        self._T = T
        self._active_T = active_T
        self.active_tokens: jax.Array | int = T
        self.count: jax.Array | int = self._N // self._C
        """Chunks that hold an active token; traced where the activity is."""
        place_N = jnp.arange(self._N)
        if active_T is not None:
            self.active_tokens = active_T.sum()
            self.count = (self.active_tokens + self._C - 1) // self._C
            token_T = jnp.nonzero(active_T, size=T, fill_value=0)[0]
            last = jnp.maximum(self.active_tokens - 1, 0)
            token_N = token_T[jnp.minimum(place_N, last)]
            arrays = jax.tree.map(lambda array: array[token_N], arrays)
        elif self._N > T:
            token_N = jnp.minimum(place_N, T - 1)
            arrays = jax.tree.map(lambda array: array[token_N], arrays)
        self._arrays = arrays

    def take(self, i: jax.Array) -> tuple[Any, jax.Array]:
        """The arrays of chunk i, [C, ..] each, and which of its places count, bool [C]."""
        start = i * self._C
        chunk = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, start, self._C), self._arrays
        )
        return chunk, start + jnp.arange(self._C) < self.active_tokens

    def empty(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Zeros [N, *shape], for `put`."""
        return jnp.zeros((self._N, *shape), dtype)

    def put(self, whole: Any, i: jax.Array, chunk: Any) -> Any:
        """The arrays [N, ..] with chunk i replaced, in their own dtype."""
        return jax.tree.map(
            lambda into, new: jax.lax.dynamic_update_slice_in_dim(
                into, new.astype(into.dtype), i * self._C, 0
            ),
            whole,
            chunk,
        )

    def restore(self, whole: Any) -> Any:
        """The arrays [N, ..] in the order of the tokens, [T, ..]; zeros where not active."""
        active_T = self._active_T
        if active_T is None:
            return jax.tree.map(lambda array: array[: self._T], whole)
        rank_T = jnp.maximum(jnp.cumsum(active_T) - 1, 0)

        def restored(array):
            active = active_T.reshape(-1, *[1] * (array.ndim - 1))
            return jnp.where(active, array[rank_T], 0)

        return jax.tree.map(restored, whole)
