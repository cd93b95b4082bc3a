"""The loop over chunks of tokens that scores both heads and forms the policy's gradients.

As kernels/linear_objective/schedule.py, with the divergence from a teacher in the loss: neither
the policy's logits nor the teacher's exist whole. `fast` keeps both logits of a chunk between its
two passes (four matrix products), `lean` multiplies again (six). A top_k costs one more, which
finds the teacher's likeliest ids. There is an implementation in XLA only, on every platform.

Dimension key:
    T: tokens
    C: tokens of one chunk
    D: width of the policy
    E: width of the teacher
    V: rows of the heads given, which may be one shard of the vocabulary
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.linear_distillation import xla
from kernels.linear_distillation.reference import border
from kernels.linear_distillation.xla import KeptPairs, Pair, TokenDivergence, TokensAndHead
from kernels.linear_objective.arguments import check_arrays, check_objective
from kernels.linear_objective.chunks import TokenChunks, even_size
from kernels.linear_objective.reference import Objective
from kernels.linear_objective.schedule import LEAST_MASKED_TOKENS, MASKED_CHUNKS, HeadOptions
from kernels.linear_objective.xla import chunk_tokens
from kernels.token_logprob.ops import first_column, make_support
from kernels.token_logprob.reference import TokenLogprob
from kernels.token_logprob.statistics import finish, slopes

_MULTIPLE = 8
"""Tokens of a chunk are computed best in multiples of it."""


class DistilledGradients(NamedTuple):
    """Of a sum over the active tokens, in hidden and in this device's rows of the head."""

    scores: TokenLogprob
    """As HeadGradients has them."""
    divergence_T: jax.Array
    """KL(policy || teacher), float32 [T], nats; zeros where not active."""
    hidden_TD: jax.Array
    head_VD: jax.Array
    """These two as HeadGradients has them."""


def value_and_gradients(
    policy: TokensAndHead,
    teacher: TokensAndHead,
    ids_T: jax.Array,
    active_T: jax.Array,
    data: Any,
    objective: Objective,
    weight_T: jax.Array,
    options: HeadOptions,
    *,
    top_k: int | None = None,
    head_grad_VD: jax.Array | None = None,
) -> DistilledGradients:
    """Scores every active token and forms the gradients of objective + weight x divergence.

    Args:
        policy, teacher: hidden states [T, D] and [T, E], heads [V, D] and [V, E]. The dtype of
            each one's hidden states is that of the operands of its products; sums are float32.
        ids_T .. objective, weight_T, top_k: as `reference.linear_distillation`.
        options: the schedule, temperature, support and vocab_axis count.
        head_grad_VD: float32, to be added to; None for zeros.

    Raises:
        ValueError: if the arrays or the objective do not belong together.
    """
    hidden_TD, head_VD = policy
    check_arrays(hidden_TD, head_VD, ids_T, active_T, (data, weight_T))
    check_arrays(*teacher, ids_T, active_T)
    check_objective(objective, data)
    if teacher.head_VD.shape[0] != head_VD.shape[0]:
        raise ValueError(
            f"both heads need the same rows, got {head_VD.shape[0]} of the policy and "
            f"{teacher.head_VD.shape[0]} of the teacher"
        )
    loop = _Loop(head_VD, teacher.head_VD, options, top_k)
    chunks = loop.chunks(
        (hidden_TD, teacher.hidden_CD, ids_T.astype(jnp.int32), data, weight_T), active_T
    )
    hidden_dtype = hidden_TD.dtype if options.vocab_axis is None else jnp.float32
    if head_grad_VD is None:
        head_grad_VD = jnp.zeros(head_VD.shape, jnp.float32)

    def pull(scored, data_C):
        value = lambda logprob, entropy: objective(logprob, entropy, data_C).sum()
        d_logprob, d_entropy = jax.grad(value, argnums=(0, 1))(scored.logprob, scored.entropy)
        return TokenLogprob(d_logprob, jnp.zeros_like(d_logprob), d_entropy)

    def step(place, carry):
        scores, divergence, d_hidden, head_grad_VD = carry
        (hidden_CD, teacher_CE, ids_C, data_C, weight_C), counts_C = chunks.chunk_at(place)
        pair = loop.pair(hidden_CD, teacher_CE, ids_C)
        scored, diverged, kept = loop.score(pair)
        cotangents = TokenLogprob(
            *(jnp.where(counts_C, each, 0.0) for each in pull(scored, data_C))
        )
        d_hidden_CD, head_grad_VD = xla.gradient(
            pair,
            slopes(scored, cotangents, pair.support),
            diverged,
            jnp.where(counts_C, weight_C, 0.0) / pair.support.temperature,
            head_grad_VD,
            kept,
        )
        return (
            chunks.store(scores, place, scored),
            chunks.store(divergence, place, diverged.value),
            chunks.store(d_hidden, place, d_hidden_CD),
            head_grad_VD,
        )

    zeros = chunks.zeros((), jnp.float32)
    start = (
        TokenLogprob(zeros, zeros, zeros),
        zeros,
        chunks.zeros(hidden_TD.shape[1:], hidden_dtype),
        head_grad_VD,
    )
    *of_tokens, d_head_VD = chunks.walk(step, start)
    scores, divergence, d_hidden = chunks.restore(of_tokens)
    return DistilledGradients(scores, divergence, d_hidden, d_head_VD)


class _Loop:
    """The rows of both heads on this device, and what is done with the tokens of a chunk."""

    def __init__(self, head_VD, teacher_head_VE, options: HeadOptions, top_k: int | None):
        V, axis = head_VD.shape[0], options.vocab_axis
        shards = 1 if axis is None else jax.lax.axis_size(axis)
        self._heads = head_VD, teacher_head_VE
        self._axis = axis
        self._first = first_column(V, axis)
        self._support = make_support(V * shards, options.temperature, options.valid_vocab)
        self._top_k = None if top_k is None or top_k >= self._support.columns else top_k
        self._keeps = options.schedule == "fast"
        self._options = options

    def chunks(self, arrays, active_T) -> TokenChunks:
        """These arrays, hidden states [T, D] first, in chunks that suit the passes."""
        T, dtype = arrays[0].shape[0], arrays[0].dtype
        at_most = self._options.chunk_tokens
        if at_most is None:
            V, D = self._heads[0].shape
            # Twice the vocabulary: the logits of both are kept.
            at_most = chunk_tokens(2 * V, D, keep=self._keeps, dtype=dtype)
            at_most = min(at_most, max(LEAST_MASKED_TOKENS, -(-T // MASKED_CHUNKS)))
        size = even_size(T, at_most, _MULTIPLE)
        last_size = -(-size // 2 // _MULTIPLE) * _MULTIPLE
        return TokenChunks(arrays, active_T, size=size, last_size=last_size)

    def pair(self, hidden_CD, teacher_CE, ids_C) -> Pair:
        """The tokens of a chunk in both models."""
        head_VD, teacher_head_VE = self._heads
        teacher = TokensAndHead(teacher_CE, teacher_head_VE)
        least_C = jnp.full(ids_C.shape, -jnp.inf, jnp.float32)
        if self._top_k is not None:
            found = xla.largest(teacher, self._support, top_k=self._top_k, first_column=self._first)
            if self._axis is not None:
                every = jax.lax.all_gather(found, self._axis, axis=1, tiled=True)
                found = jax.lax.top_k(every, self._top_k + 1)[0]
            least_C = border(found)
        policy = TokensAndHead(hidden_CD, head_VD)
        return Pair(policy, teacher, ids_C, least_C, self._support, self._first)

    def score(self, pair: Pair) -> tuple[TokenLogprob, TokenDivergence, KeptPairs | None]:
        """Scores and divergence over the whole vocabulary, and what the gradient may reuse."""
        found, kept = xla.score(pair, keep=self._keeps)
        if self._axis is not None:
            gathered: Any = jax.tree.map(lambda x: jax.lax.all_gather(x, self._axis), found)
            found = xla.merge_pairs(gathered)
        scored = finish(found.policy, pair.ids_C, self._support)
        return scored, xla.diverge(found, scored.logsumexp), kept
