"""Prefill: keys and values of prompts into the prefix pool, a chunk at a time.

A prompt is prefilled once for all its completions. A long prompt takes several calls, so that
segments can run between them and the slots go on decoding. A call has chunks of one padded size
(sizes double), each size being a program of its own. The last prompt token is left out: a row runs
it as its first token step, so no output head is applied here.

Dimension key:
    Q: prompts of a call
    C: tokens of a chunk
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.transformer import Params, forward
from rollout_worker.engine.kv_cache import LayerCache, first_attend, next_attend
from rollout_worker.engine.layout import embed
from rollout_worker.engine.slots import DecodeSpec, mesh_arguments

SHORTEST_CHUNK = 32


class Chunks(NamedTuple):
    """One chunk each of several prompts of a lane."""

    token_QC: jax.Array
    """int32; padded after a chunk's own tokens. The padding's keys and values are masked later, or
    replaced by the next chunk."""
    entry_Q: jax.Array
    """int32: entry of the pool; past its end for the unused chunks of the call."""
    start_Q: jax.Array
    """int32: position of the chunk's first token."""


class PromptPiece(NamedTuple):
    """One chunk of a prompt, to be prefilled."""

    entry: int
    start: int
    token_ids: np.ndarray


def prefill(
    params: Params, pool: list[LayerCache], chunks: Chunks, *, spec: DecodeSpec, first: bool
) -> tuple[list[LayerCache], jax.Array]:
    """Computes the keys and values of some chunks and writes them into the pool.

    Args:
        first: every chunk is the first of its prompt, so that it attends to itself alone.

    Returns:
        the pool, and int32 [1], which is ready when the pool is: the host can wait for it, where
        the pool itself is donated to the next call.
    """
    C = chunks.token_QC.shape[1]
    # XLA:CPU supports bfloat16 products of some shapes only, and fails when the others run.
    operand_dtype = jnp.dtype("float32") if spec.wide_cache else spec.attention_dtype
    how: Any = dict(
        operand_dtype=operand_dtype, plan=spec.prefill_attention, **mesh_arguments(spec)
    )
    if first:
        attend = first_attend(chunks.entry_Q, **how)
    else:
        attend = next_attend(chunks.entry_Q, chunks.start_Q, **how)
    _, pool = forward(
        params,
        spec.layout.config,
        chunks.token_QC,
        chunks.start_Q[:, None] + jnp.arange(C),
        attend,
        compute_dtype=spec.compute_dtype,
        product_dtype=jnp.dtype("float32"),
        cache=pool,
        embed=embed,
    )
    return pool, jnp.sum(chunks.entry_Q, dtype=jnp.int32)[None]


def chunk_sizes(longest_chunk: int) -> tuple[int, ...]:
    """Padded lengths of a chunk: doubling up to the longest."""
    sizes = [longest_chunk]
    while sizes[0] // 2 >= SHORTEST_CHUNK:
        sizes.insert(0, sizes[0] // 2)
    return tuple(sizes)


def pack_chunks(
    lanes: Sequence[Sequence[PromptPiece]], prompts: int, size: int, no_entry: int
) -> Chunks:
    """The pieces of every lane, as numpy arrays of one call of `prompts` chunks per lane."""
    D = len(lanes)
    token_QC = np.zeros((D, prompts, size), np.int32)
    entry_Q = np.full((D, prompts), no_entry, np.int32)
    start_Q = np.zeros((D, prompts), np.int32)
    for lane, pieces in enumerate(lanes):
        for q, piece in enumerate(pieces):
            token_QC[lane, q, : len(piece.token_ids)] = piece.token_ids
            entry_Q[lane, q] = piece.entry
            start_Q[lane, q] = piece.start
    arrays: Any = (token_QC.reshape(-1, size), entry_Q.reshape(-1), start_Q.reshape(-1))
    return Chunks(*arrays)
