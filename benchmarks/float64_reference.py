"""Values and gradients in float64 numpy: what errors are measured against.

The gradient is written out, from the same derivatives that `token_logprob.statistics.slopes`
states, so that nothing here goes through an implementation that is being checked.

Dimension key:
    N: tokens
    C: columns of the logits given, which may be any part of the vocabulary
    V: all columns of the logits
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Scores(NamedTuple):
    """What a distribution says of its token; float64 [N] each, in nats."""

    logprob: np.ndarray
    logsumexp: np.ndarray
    entropy: np.ndarray


class Cotangents(NamedTuple):
    """An objective at given scores: its value and slopes; float64 [N] each."""

    loss: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray


class Distance(NamedTuple):
    """How far an array is from what it should be."""

    rel_l2: float
    """Norm of the difference over that of the truth; infinite where the truth alone is zero."""
    cosine: float
    """0 where one of the two is zero."""


def scores(
    logits_NV: np.ndarray, ids_N: np.ndarray, *, temperature: float, valid_vocab: int
) -> Scores:
    """As `token_logprob.reference` defines them; every row needs a finite logit in its support."""
    z_NV = logits_NV[:, :valid_vocab].astype(np.float64) / temperature
    top_N = z_NV.max(axis=1)
    weight_NV = np.exp(z_NV - top_N[:, None])
    total_N = weight_NV.sum(axis=1)
    logsumexp_N = top_N + np.log(total_N)
    finite_NV = np.where(weight_NV > 0, z_NV, 0.0)
    entropy_N = logsumexp_N - (weight_NV * finite_NV).sum(axis=1) / total_N
    is_possible_N = (ids_N >= 0) & (ids_N < valid_vocab)
    chosen_N = z_NV[np.arange(len(ids_N)), np.where(is_possible_N, ids_N, 0)]
    logprob_N = np.where(is_possible_N, chosen_N - logsumexp_N, -np.inf)
    return Scores(logprob_N, logsumexp_N, entropy_N)


def logits_gradient(
    logits_NC: np.ndarray,
    column_C: np.ndarray,
    ids_N: np.ndarray,
    scores: Scores,
    cotangents: Cotangents,
    *,
    temperature: float,
    valid_vocab: int,
) -> np.ndarray:
    """The gradient in the given columns; float64 [N, C].

    Args:
        column_C: number of each column in the whole vocabulary.
        scores: of the whole vocabulary.
    """
    is_possible_NC = (column_C < valid_vocab) & (logits_NC != -np.inf)
    z_NC = logits_NC.astype(np.float64) / temperature
    log_p_NC = np.where(is_possible_NC, z_NC - scores.logsumexp[:, None], 0.0)
    p_NC = np.where(is_possible_NC, np.exp(log_p_NC), 0.0)
    is_id_NC = (column_C == ids_N[:, None]) & is_possible_NC
    d_logprob_N = np.where(scores.logprob == -np.inf, 0.0, cotangents.logprob)
    d_z_NC = d_logprob_N[:, None] * (is_id_NC - p_NC)
    d_z_NC -= cotangents.entropy[:, None] * p_NC * (log_p_NC + scores.entropy[:, None])
    return d_z_NC / temperature


def cotangents(objective: Callable, scores: Scores, data: Any) -> Cotangents:
    """Value and slopes of a per-token objective at exact scores.

    The objective itself runs in float32: it is the user's, it is the same for everything that is
    checked, and its rounding is that of one token.
    """

    def total(logprob_N, entropy_N):
        loss_N = objective(logprob_N, entropy_N, data)
        return loss_N.sum(), loss_N

    arguments = (jnp.asarray(each, jnp.float32) for each in (scores.logprob, scores.entropy))
    slopes, loss_N = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(*arguments)
    return Cotangents(*(np.asarray(each, np.float64) for each in (loss_N, *slopes)))


def distance(actual: Any, expected: np.ndarray) -> Distance:
    """Compares two arrays of one shape as two long vectors."""
    actual = np.asarray(actual).astype(np.float64)
    size, expected_size = np.linalg.norm(actual), np.linalg.norm(expected)
    off = np.linalg.norm(actual - expected)
    if expected_size == 0:
        return Distance(0.0 if size == 0 else np.inf, 0.0)
    cosine = 0.0 if size == 0 else np.vdot(actual, expected) / size / expected_size
    return Distance(float(off / expected_size), float(cosine))
