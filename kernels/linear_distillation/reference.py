"""The divergence of a language model's head from a teacher's, beside an objective: the definition.

KL(policy || teacher) of each token's distribution, the reverse direction of distillation, over the
whole vocabulary or over the teacher's likeliest ids and all others taken together. Here the logits
of both exist at once: this is what the implementation is checked against.

Dimension key:
    T: tokens
    D: width of the policy
    E: width of the teacher
    V: vocabulary (rows of both heads)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.linear_objective.reference import Objective, sum_objective
from kernels.token_logprob import reference

TIE = 1e-4
"""Logprobs of a teacher that differ by less are equal, in nats."""


class LinearDistillation(NamedTuple):
    """What one call returns; float32, in nats."""

    loss: jax.Array
    """Scalar: objective plus weight x divergence, summed over the active tokens."""
    logprob_T: jax.Array
    """log p(id) of each active token; 0 elsewhere."""
    entropy_T: jax.Array
    """Entropy of each active token's distribution; 0 elsewhere."""
    divergence_T: jax.Array
    """KL(policy || teacher) of each active token; 0 elsewhere."""


def linear_distillation(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    teacher_hidden_TE: jax.Array,
    teacher_head_VE: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    data: Any,
    objective: Objective,
    weight_T: jax.Array,
    *,
    top_k: int | None = None,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> LinearDistillation:
    """Sums objective + weight x KL(policy || teacher) over the active tokens.

    Source: MiniLLM, arXiv:2306.08543, for the direction; GKD, arXiv:2306.13649, for the sum over
    the vocabulary at every token of the policy's own completions.

    Args:
        hidden_TD .. objective: as `linear_objective` has them.
        teacher_hidden_TE, teacher_head_VE: float; no gradient flows into them.
        weight_T: float [T]; a constant of each token.
        top_k: as `divergence` has it.
        temperature, valid_vocab: of both distributions.

    Returns:
        LinearDistillation, differentiable in hidden and head.
    """
    support = {"temperature": temperature, "valid_vocab": valid_vocab}

    def logits(hidden_TX, head_VX):
        hidden_TX = hidden_TX.astype(jnp.float32)
        if active_T is not None:
            hidden_TX = jnp.where(active_T[:, None], hidden_TX, 0.0)
        return jnp.matmul(hidden_TX, head_VX.astype(jnp.float32).T, precision="highest")

    logits_TV = logits(hidden_TD, head_VD)
    teacher_TV = jax.lax.stop_gradient(logits(teacher_hidden_TE, teacher_head_VE))
    scored = reference.token_logprob(logits_TV, ids_T, **support)
    out = sum_objective(scored.logprob, scored.entropy, active_T, data, objective)
    divergence_T = divergence(logits_TV, teacher_TV, top_k=top_k, **support)
    if active_T is not None:
        divergence_T = jnp.where(active_T, divergence_T, 0.0)
        weight_T = jnp.where(active_T, weight_T, 0.0)
    loss = out.loss + (weight_T * divergence_T).sum()
    return LinearDistillation(loss, out.logprob_T, out.entropy_T, divergence_T)


def divergence(
    logits_TV: jax.Array,
    teacher_TV: jax.Array,
    *,
    top_k: int | None = None,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> jax.Array:
    """KL(policy || teacher) of each token; [T], in nats.

    Args:
        logits_TV, teacher_TV: finite within the support.
        top_k: the ids that the teacher holds for likeliest count one by one, those within 1e-4 nats
            of the last of them included; all others count as one, with the sum of their
            probabilities. That is never more than the whole divergence, and 0 only where these
            probabilities are equal. None, or at least the size of the support: each id counts.
    """
    V = logits_TV.shape[1]
    support = V if valid_vocab is None else valid_vocab
    log_p_TV = jax.nn.log_softmax(logits_TV[:, :support] / temperature)
    log_q_TV = jax.nn.log_softmax(teacher_TV[:, :support] / temperature)
    if top_k is None or top_k >= support:
        return (jnp.exp(log_p_TV) * (log_p_TV - log_q_TV)).sum(axis=1)
    least_T = border(jax.lax.top_k(log_q_TV, top_k + 1)[0])
    likely_TV = log_q_TV >= least_T[:, None]
    each_TV = jnp.where(likely_TV, jnp.exp(log_p_TV) * (log_p_TV - log_q_TV), 0.0)
    others = lambda log_TV: jnp.where(likely_TV, 0.0, jnp.exp(log_TV)).sum(axis=1)
    p_T, q_T = others(log_p_TV), others(log_q_TV)
    has_others_T = ~likely_TV.all(axis=1)
    ratio_T = jnp.log(jnp.where(has_others_T, p_T, 1.0)) - jnp.log(
        jnp.where(has_others_T, q_T, 1.0)
    )
    return each_TV.sum(axis=1) + p_T * ratio_T


def border(largest_TK: jax.Array) -> jax.Array:
    """From where on an id is likely: halfway between the last likely one and the next, and at most
    TIE nats below the last.

    So equal ones are all likely, and a product that is formed again, with another rounding, changes
    nothing.

    Args:
        largest_TK: the top_k + 1 largest logs of a distribution, or its tempered logits, falling.
    """
    last_T, next_T = largest_TK[:, -2], largest_TK[:, -1]
    return jnp.minimum(0.5 * (last_T + next_T), last_T - TIE)
