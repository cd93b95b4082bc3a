"""The passes over one chunk of tokens for the divergence from a teacher, in plain XLA.

They go through both heads in blocks of the same rows, so that the float32 logits of one block of
each are all that exists of them. `largest` finds where the teacher's likeliest ids end, `score`
keeps statistics, `gradient` turns the logits into their gradient and multiplies it back. What
`score` may keep for it are the logits of each block less the block's own top, in the dtype of the
hidden states.

With p of the policy and q of the teacher, a = log p - log q for each likely id, and for every other
one a = log P - log Q of their sums:

    KL      = sum of p a
    dKL/dz  = p (a - KL)

Dimension key:
    C: tokens of the chunk
    D: width of a model
    V: rows of the heads given, which may be a part of the vocabulary
    R: rows of one block
    N: whole blocks
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.linear_objective.xla import LogitsBlock, block_logits, block_rows
from kernels.token_logprob import xla
from kernels.token_logprob.statistics import Slopes, Statistics, Support, merge

_TINIEST = float(jnp.finfo(jnp.float32).tiny)


class TokensAndHead(NamedTuple):
    """What one of the two models makes logits of."""

    hidden_CD: jax.Array
    """Float; its dtype is that of the operands of every product."""
    head_VD: jax.Array

    def logits(self, start: jax.Array | int, R: int) -> jax.Array:
        """float32 [C, R], of the rows from `start` on."""
        rows = jax.lax.dynamic_slice_in_dim(self.head_VD, start, R)
        return block_logits(self.hidden_CD, rows)


class Pair(NamedTuple):
    """The same tokens in both models."""

    policy: TokensAndHead
    teacher: TokensAndHead
    ids_C: jax.Array
    """int, numbered over the whole vocabulary."""
    least_C: jax.Array
    """The teacher's z from which on an id is likely, float32; -inf where each one is."""
    support: Support
    first_column: jax.Array | int = 0
    """Of the rows given, in the whole vocabulary."""

    @property
    def block_rows(self) -> int:
        """R, for both heads."""
        return block_rows(self.policy.head_VD.shape[0], self.ids_C.shape[0])

    def z(self, start: jax.Array | int, R: int) -> tuple[jax.Array, jax.Array]:
        """Of policy and teacher, float32 [C, R]; -inf outside the support."""
        column = self.first_column + start
        scaled = lambda one: xla.scaled_logits(one.logits(start, R), self.support, column)[0]
        return scaled(self.policy), scaled(self.teacher)


class PairStatistics(NamedTuple):
    """Of the part of the vocabulary that was seen; float32 [C]."""

    policy: Statistics
    teacher_top: jax.Array
    """The teacher's largest z of the support; -inf where there is none."""
    teacher_total: jax.Array
    """Sum of exp(z - teacher_top) over the teacher's z."""
    gap: jax.Array
    """Sum over the likely ids of exp(z - top) (z - teacher's z)."""
    others: jax.Array
    """Sum over the other ids of exp(z - top)."""
    teacher_others: jax.Array
    """Sum over the other ids of exp(z - teacher_top) over the teacher's z."""


class TokenDivergence(NamedTuple):
    """Of each token, float32 [C]."""

    value: jax.Array
    """KL(policy || teacher), nats."""
    teacher_logsumexp: jax.Array
    others_ratio: jax.Array
    """log P - log Q of the other ids; 0 where there are none."""


class KeptPairs(NamedTuple):
    """The logits of a chunk by policy and teacher, whose are -inf where an id is not likely."""

    whole: tuple[LogitsBlock, LogitsBlock]
    """Stacked along a first axis, [N, ..]."""
    rest: tuple[LogitsBlock, LogitsBlock] | None
    """Of the rows that do not fill a block."""


def largest(
    teacher: TokensAndHead, support: Support, *, top_k: int, first_column: jax.Array | int = 0
) -> jax.Array:
    """The top_k + 1 largest z of these rows, float32 [C, top_k + 1], falling; -inf beyond them."""
    C, V = teacher.hidden_CD.shape[0], teacher.head_VD.shape[0]
    R = block_rows(V, C)

    def look(largest_CK, start, rows):
        z_CR, _ = xla.scaled_logits(teacher.logits(start, rows), support, first_column + start)
        return jax.lax.top_k(jnp.concatenate([largest_CK, z_CR], axis=1), top_k + 1)[0], None

    nothing = jnp.full((C, top_k + 1), -jnp.inf, jnp.float32)
    found, _ = jax.lax.scan(lambda so_far, start: look(so_far, start, R), nothing, _starts(V, R))
    return look(found, V // R * R, V % R)[0] if V % R else found


def score(pair: Pair, *, keep: bool) -> tuple[PairStatistics, KeptPairs | None]:
    """Statistics of every token over these rows of both heads, and what `gradient` may reuse.

    Args:
        keep: whether to keep the logits.
    """
    C, V, R = pair.ids_C.shape[0], pair.policy.head_VD.shape[0], pair.block_rows
    dtype = pair.policy.hidden_CD.dtype

    def look(so_far, start, rows):
        column = pair.first_column + start
        logits_CR = pair.policy.logits(start, rows)
        of_policy = xla.statistics(logits_CR, pair.ids_C, pair.support, first_column=column)
        z_CR, teacher_CR = pair.z(start, rows)
        likely_CR = teacher_CR >= pair.least_C[:, None]
        teacher_top = teacher_CR.max(axis=1)
        shifted_CR = z_CR - _finite(of_policy.top)[:, None]
        teacher_shifted_CR = teacher_CR - _finite(teacher_top)[:, None]
        weight_CR, teacher_weight_CR = jnp.exp(shifted_CR), jnp.exp(teacher_shifted_CR)
        gap_CR = jnp.where(z_CR == -jnp.inf, 0.0, z_CR - teacher_CR)
        found = PairStatistics(
            policy=of_policy,
            teacher_top=teacher_top,
            teacher_total=teacher_weight_CR.sum(axis=1),
            gap=jnp.where(likely_CR, weight_CR * gap_CR, 0.0).sum(axis=1),
            others=jnp.where(likely_CR, 0.0, weight_CR).sum(axis=1),
            teacher_others=jnp.where(likely_CR, 0.0, teacher_weight_CR).sum(axis=1),
        )
        so_far = merge_pairs(jax.tree.map(lambda *parts: jnp.stack(parts), so_far, found))
        if not keep:
            return so_far, None
        kept_CR = jnp.where(likely_CR, teacher_shifted_CR, -jnp.inf)
        return so_far, (
            LogitsBlock(shifted_CR.astype(dtype), _finite(of_policy.top)),
            LogitsBlock(kept_CR.astype(dtype), _finite(teacher_top)),
        )

    zeros_C, none_C = jnp.zeros(C, jnp.float32), jnp.full(C, -jnp.inf, jnp.float32)
    nothing = PairStatistics(Statistics(none_C, *[zeros_C] * 3), none_C, *[zeros_C] * 4)
    found, kept = jax.lax.scan(lambda so_far, start: look(so_far, start, R), nothing, _starts(V, R))
    rest = None
    if V % R:
        found, rest = look(found, V // R * R, V % R)
    return found, None if kept is None else KeptPairs(kept, rest)


def merge_pairs(parts: PairStatistics) -> PairStatistics:
    """Statistics of the whole from those of its parts, stacked along the first axis."""
    policy, teacher_top = merge(parts.policy), parts.teacher_top.max(axis=0)
    factor = jnp.exp(parts.policy.top - _finite(policy.top))
    teacher_factor = jnp.exp(parts.teacher_top - _finite(teacher_top))
    return PairStatistics(
        policy=policy,
        teacher_top=teacher_top,
        teacher_total=(teacher_factor * parts.teacher_total).sum(axis=0),
        gap=(factor * parts.gap).sum(axis=0),
        others=(factor * parts.others).sum(axis=0),
        teacher_others=(teacher_factor * parts.teacher_others).sum(axis=0),
    )


def diverge(whole: PairStatistics, logsumexp_C: jax.Array) -> TokenDivergence:
    """The divergence, from the statistics of the whole vocabulary.

    Args:
        logsumexp_C: of the policy.
    """
    teacher_logsumexp_C = jnp.log(whole.teacher_total) + whole.teacher_top
    others_C = whole.others / whole.policy.total
    teacher_others_C = jnp.maximum(whole.teacher_others, _TINIEST) / whole.teacher_total
    ratio_C = jnp.where(others_C > 0, jnp.log(others_C) - jnp.log(teacher_others_C), 0.0)
    likely_C = whole.gap / whole.policy.total
    likely_C -= (1.0 - others_C) * (logsumexp_C - teacher_logsumexp_C)
    return TokenDivergence(likely_C + others_C * ratio_C, teacher_logsumexp_C, ratio_C)


def gradient(
    pair: Pair,
    slopes: Slopes,
    divergence: TokenDivergence,
    pull_C: jax.Array,
    head_grad_VD: jax.Array,
    kept: KeptPairs | None,
) -> tuple[jax.Array, jax.Array]:
    """The gradient in the policy's hidden states, over these rows of the heads, and head_grad with
    its own added.

    Args:
        slopes: of the objective, as `statistics.slopes` gives them.
        pull_C: slope of the loss in the divergence, divided by the temperature.
        head_grad_VD: float32; the sum so far.
        kept: what `score` returned for the same tokens.

    Returns:
        float32 [C, D] and float32 [V, D].
    """
    V, R = pair.policy.head_VD.shape[0], pair.block_rows
    hidden_CD = pair.policy.hidden_CD
    product = lambda left, right: jnp.matmul(left, right, preferred_element_type=jnp.float32)

    def log_probabilities(start, rows, blocks):
        """Logs of p and q, this one -inf where an id is not likely."""
        if blocks is None:
            z_CR, teacher_CR = pair.z(start, rows)
            likely_CR = teacher_CR >= pair.least_C[:, None]
            log_q_CR = teacher_CR - divergence.teacher_logsumexp[:, None]
            return z_CR - slopes.logsumexp[:, None], jnp.where(likely_CR, log_q_CR, -jnp.inf)
        both = zip(blocks, (slopes.logsumexp, divergence.teacher_logsumexp), strict=True)
        return [
            block.shifted.astype(jnp.float32) + (block.top - logsumexp_C)[:, None]
            for block, logsumexp_C in both
        ]

    def fold(so_far, start, rows, blocks):
        d_hidden_CD, head_grad_VD = so_far
        log_p_CR, log_q_CR = log_probabilities(start, rows, blocks)
        column_CR = jax.lax.broadcasted_iota(jnp.int32, log_p_CR.shape, 1)
        column_CR += pair.first_column + start
        ratio_CR = jnp.where(
            log_q_CR == -jnp.inf, divergence.others_ratio[:, None], log_p_CR - log_q_CR
        )
        of_teacher_CR = jnp.exp(log_p_CR) * (ratio_CR - divergence.value[:, None])
        of_teacher_CR = jnp.where(log_p_CR == -jnp.inf, 0.0, of_teacher_CR)
        d_logits_CR = xla.gradient_at(log_p_CR, column_CR, pair.ids_C, slopes)
        d_logits_CR = (d_logits_CR + pull_C[:, None] * of_teacher_CR).astype(hidden_CD.dtype)
        head_RD = jax.lax.dynamic_slice_in_dim(pair.policy.head_VD, start, rows)
        added_RD = product(d_logits_CR.T, hidden_CD)
        added_RD += jax.lax.dynamic_slice_in_dim(head_grad_VD, start, rows)
        head_grad_VD = jax.lax.dynamic_update_slice_in_dim(head_grad_VD, added_RD, start, 0)
        return d_hidden_CD + product(d_logits_CR, head_RD.astype(hidden_CD.dtype)), head_grad_VD

    def step(so_far, block):
        start, blocks = block
        return fold(so_far, start, R, blocks), None

    begin: Any = (jnp.zeros(hidden_CD.shape, jnp.float32), head_grad_VD)
    blocks, rest = (None, None) if kept is None else kept
    found, _ = jax.lax.scan(step, begin, (_starts(V, R), blocks))
    return fold(found, V // R * R, V % R, rest) if V % R else found


def _starts(V: int, R: int) -> jax.Array:
    return jnp.arange(0, V // R * R, R)


def _finite(top: jax.Array) -> jax.Array:
    """A number to subtract: where there is none, any gives exp(-inf) = 0."""
    return jnp.where(top == -jnp.inf, 0.0, top)
