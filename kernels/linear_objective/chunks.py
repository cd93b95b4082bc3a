"""Active tokens in chunks of one size, for the loop of schedule.py.

Shapes are static, the number of active tokens is not: the active ones are moved to the front, and
only chunks that hold an active token are visited. The last chunk has half the size where the
remaining tokens fit it. Its empty places repeat the last token, so that a chunk holds real tokens
only.

Dimension key:
    T: tokens
    N: token places in all chunks, at least T
    C: tokens of one chunk
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def even_size(T: int, at_most: int, multiple: int) -> int:
    """Tokens of each chunk of T, evened out over as few chunks as the bound allows.

    They are a multiple of `multiple`, as far as the bound allows that.
    """
    chunks = -(-T // at_most)
    return min(at_most, T, -(-T // chunks // multiple) * multiple)


class Place(NamedTuple):
    """Where a chunk lies among the N places."""

    start: Any
    """int32 scalar."""
    size: int


class TokenChunks:
    """Arrays of the active tokens, to be read and written a chunk at a time."""

    def __init__(self, arrays: Any, active_T: jax.Array | None, *, size: int, last_size: int):
        """Args:
        arrays: pytree of arrays [T, ..].
        active_T: bool [T], or None where all are.
        size: C, at most T; see `even_size`.
        last_size: of the last chunk, where that is enough and tokens may be inactive.
        """
        T = jax.tree.leaves(arrays)[0].shape[0]
        self._C, self._last_C = size, min(size, last_size)
        self._N = -(-T // size) * size
        self._T = T
        self._active_T = active_T
        self._active_tokens: jax.Array | int = T
        place_N = jnp.arange(self._N)
        if active_T is not None:
            self._active_tokens = active_T.sum()
            token_T = jnp.nonzero(active_T, size=T, fill_value=0)[0]
            last = jnp.maximum(self._active_tokens - 1, 0)
            token_N = token_T[jnp.minimum(place_N, last)]
            arrays = jax.tree.map(lambda array: array[token_N], arrays)
        elif self._N > T:
            token_N = jnp.minimum(place_N, T - 1)
            arrays = jax.tree.map(lambda array: array[token_N], arrays)
        self._arrays = arrays

    def walk(self, step: Callable[[Place, Any], Any], carry: Any) -> Any:
        """step(place, carry) -> carry over every chunk that holds an active token."""
        one_size = lambda i, carry: step(Place(i * self._C, self._C), carry)
        if self._active_T is None or self._last_C == self._C:
            count = (self._active_tokens + self._C - 1) // self._C
            return jax.lax.fori_loop(0, count, one_size, carry)
        whole, rest = self._active_tokens // self._C, self._active_tokens % self._C
        whole = whole + (rest > self._last_C)
        carry = jax.lax.fori_loop(0, whole, one_size, carry)
        # A loop of one round or none: the compiler would run a branch's both sides in some places.
        small = jnp.asarray((rest > 0) & (rest <= self._last_C), jnp.int32)
        last = Place(whole * self._C, self._last_C)
        return jax.lax.fori_loop(0, small, lambda _, carry: step(last, carry), carry)

    def chunk_at(self, place: Place) -> tuple[Any, jax.Array]:
        """The arrays of a chunk, [size, ..] each, and which of its tokens count, bool [size]."""
        chunk = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, place.start, place.size),
            self._arrays,
        )
        return chunk, place.start + jnp.arange(place.size) < self._active_tokens

    def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Zeros [N, *shape], for `store`."""
        return jnp.zeros((self._N, *shape), dtype)

    def store(self, whole: Any, place: Place, chunk: Any) -> Any:
        """The arrays [N, ..] with a chunk replaced, in their own dtype."""
        return jax.tree.map(
            lambda into, new: jax.lax.dynamic_update_slice_in_dim(
                into, new.astype(into.dtype), place.start, 0
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
