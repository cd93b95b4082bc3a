"""Random problems for benches of the loss: data on the device, and an objective.

Logits have a standard deviation of about 3, so that the running maximum and the sums of a softmax
have work to do, and tokens are drawn from them, so that logprobs are those of real completions.
Data is made in pieces: nothing of the size of the whole exists in float32.

Dimension key:
    N: tokens
    D: model width
    V: vocabulary
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.token_logprob import reference
from kernels.token_logprob.reference import TokenLogprob

LOGITS_STD = 3.0
PIECE_VALUES = 2**21
"""Bound on the values of one piece, so that making the data does not set the peak of memory."""
PIECE_ROWS = 64
"""Rows of a piece where the vocabulary is so large that the bound would leave fewer."""


class GrpoData(NamedTuple):
    """What the clipped surrogate needs of each token; float32 [N]."""

    behavior_logprob_N: jax.Array
    advantage_N: jax.Array


def grpo_objective(
    logprob_N: jax.Array,
    entropy_N: jax.Array,
    data: GrpoData,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coef: float = 0.01,
) -> jax.Array:
    """The clipped surrogate of PPO with an entropy bonus; float32 [N].

    learner/objective/loss.py has those that are trained with; this one stands for them here.
    """
    ratio_N = jnp.exp(jnp.clip(logprob_N - data.behavior_logprob_N, -20.0, 20.0))
    clipped_N = jnp.clip(ratio_N, 1.0 - clip_low, 1.0 + clip_high)
    loss_N = -jnp.minimum(ratio_N * data.advantage_N, clipped_N * data.advantage_N)
    return loss_N - entropy_coef * entropy_N if entropy_coef else loss_N


class ClipShares(NamedTuple):
    """Shares of the tokens, 0..1."""

    ratio_low: float
    """Ratio below the clip range."""
    ratio_high: float
    """Ratio above it."""
    clipped: float
    """Clipped, so without a gradient: low with a negative advantage, high with a positive one."""


def clip_shares(
    logprob_N: jax.Array, data: GrpoData, *, clip_low: float, clip_high: float
) -> ClipShares:
    """Where the ratios of a problem lie."""
    ratio_N = jnp.exp(logprob_N - data.behavior_logprob_N)
    low_N, high_N = ratio_N < 1.0 - clip_low, ratio_N > 1.0 + clip_high
    held_N = (low_N & (data.advantage_N < 0)) | (high_N & (data.advantage_N > 0))
    return ClipShares(*(float(each.mean()) for each in (low_N, high_N, held_N)))


def make_data(key: jax.Array, logprob_N: jax.Array, noise: float) -> GrpoData:
    """Advantages of both signs, and behaviour logprobs off the policy's by `noise` nats.

    Args:
        logprob_N: float32; of the policy.
        noise: standard deviation; 0 makes every ratio one.
    """
    noise_key, advantage_key = jax.random.split(key)
    return GrpoData(
        logprob_N + noise * jax.random.normal(noise_key, logprob_N.shape),
        jax.random.normal(advantage_key, logprob_N.shape),
    )


@functools.partial(jax.jit, static_argnames=("rows", "columns", "dtype"))
def normal(key: jax.Array, std: float, *, rows: int, columns: int, dtype: Any) -> jax.Array:
    """Normal values [rows, columns] of a standard deviation, drawn in float32."""
    piece = _piece(rows, columns)

    def fill(i, out):
        values = std * jax.random.normal(jax.random.fold_in(key, i), (piece, columns))
        return jax.lax.dynamic_update_slice_in_dim(out, values.astype(dtype), i * piece, 0)

    # A last piece that would reach past the end is moved back, over values as random as its own.
    start = jnp.zeros((rows, columns), dtype)
    return jax.lax.fori_loop(0, -(-rows // piece), fill, start)


@jax.jit
def draw_from_logits(
    key: jax.Array, logits_NV: jax.Array, temperature: float
) -> tuple[jax.Array, TokenLogprob]:
    """A token of each row's distribution, int32 [N], and what the row says of it, float32 [N]."""
    return _draw(key, logits_NV, lambda rows: rows, logits_NV.shape[1], temperature)


@jax.jit
def draw_from_head(
    key: jax.Array, hidden_ND: jax.Array, head_VD: jax.Array, temperature: float
) -> tuple[jax.Array, TokenLogprob]:
    """The same for the logits hidden head^T, summed in float32."""

    def logits_of(hidden):
        return jnp.matmul(
            hidden, head_VD.T, precision="highest", preferred_element_type=jnp.float32
        )

    return _draw(key, hidden_ND, logits_of, head_VD.shape[0], temperature)


def _draw(key, rows_N, logits_of: Callable, V, temperature):
    N = rows_N.shape[0]
    piece = _piece(N, V)

    def draw(i, out):
        start = jnp.minimum(i * piece, N - piece)
        logits = logits_of(jax.lax.dynamic_slice_in_dim(rows_N, start, piece))
        logits = logits.astype(jnp.float32)
        ids = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        scored = reference.token_logprob(logits / temperature, ids)
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, start, 0),
            out,
            (ids.astype(jnp.int32), scored),
        )

    empty = (jnp.zeros(N, jnp.int32), TokenLogprob(*[jnp.zeros(N)] * 3))
    return jax.lax.fori_loop(0, -(-N // piece), draw, empty)


def _piece(rows: int, columns: int) -> int:
    return min(rows, max(PIECE_ROWS, PIECE_VALUES // columns))
