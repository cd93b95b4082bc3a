"""Cases of the gradient check: objectives of the learner on random and on difficult data.

A problem is the loss of a few tokens, given either logits or hidden states and a head. Its true
gradient is worked out in float64 (`float64_reference.py`), for the objectives of training.

Dimension key:
    N: tokens
    D: model width
    V: vocabulary
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float64_reference
from learner.objective.loss import Objective, token_terms, token_weight

BATCH = 3
"""Sequences among which the tokens are divided."""


class CaseTokens(NamedTuple):
    """What the learner's objectives need of each token; float32 [N]."""

    behavior_logprob: jax.Array
    reference_logprob: jax.Array
    advantage: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientCase:
    """One objective, and what is unusual about its data."""

    name: str
    objective: Objective
    temperature: float = 1.0
    masked: bool = False
    """Sequences of different lengths under `seq_mean`, with NaN in the data of the padding."""
    hard: bool = False
    """Impossible ids and columns, ratios far outside the clip, advantages of zero."""


def _objective(kl_coef=0.0, kl_estimator="k3", entropy_coef=0.0, **policy):
    return Objective(0.2, 0.28, kl_coef, kl_estimator, entropy_coef, **policy)


CASES = (
    GradientCase(name="surrogate", objective=_objective()),
    GradientCase(name="kl_k1", objective=_objective(kl_coef=0.3, kl_estimator="k1")),
    GradientCase(name="kl_k2", objective=_objective(kl_coef=0.3, kl_estimator="k2")),
    GradientCase(name="kl_k3", objective=_objective(kl_coef=0.3, kl_estimator="k3")),
    GradientCase(name="dual_clip", objective=_objective(dual_clip=1.5)),
    GradientCase(name="cispo", objective=_objective(policy_loss="cispo")),
    GradientCase(name="soft_gate", objective=_objective(policy_loss="soft_gate")),
    GradientCase(name="entropy", objective=_objective(entropy_coef=0.3)),
    GradientCase(
        name="seq_mean",
        objective=_objective(kl_coef=0.3, entropy_coef=0.3),
        temperature=0.7,
        masked=True,
    ),
    GradientCase(name="hard", objective=_objective(entropy_coef=0.3), temperature=1.3, hard=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One case on given arrays."""

    case: GradientCase
    arrays: dict[str, jax.Array]
    """`logits` [N, V], or `hidden` [N, D] and `head` [V, D]; what gradients are taken in."""
    ids: jax.Array
    data: CaseTokens
    valid_vocab: int
    expected_loss: float
    loss_scale: float
    """Sum of the sizes of the loss's terms."""
    expected: dict[str, np.ndarray]
    """float64 gradients under the names of the arrays."""

    @property
    def active_N(self) -> jax.Array | None:
        """bool: tokens with a weight; None if all have one."""
        is_active_N = np.asarray(self.data.weight) > 0
        return None if is_active_N.all() else jnp.asarray(is_active_N)

    @property
    def support(self) -> dict[str, float | int]:
        """Temperature and vocabulary, as arguments of the operations."""
        return {"temperature": self.case.temperature, "valid_vocab": self.valid_vocab}


def token_objective(objective: Objective) -> Callable:
    """The learner's weighted token loss, as the operations of this package take an objective."""

    def of(logprob, entropy, data: CaseTokens):
        is_active = data.weight > 0
        reference = data.reference_logprob if objective.kl_coef else None
        terms = token_terms(
            logprob,
            entropy,
            data.behavior_logprob,
            data.advantage,
            is_active,
            objective,
            reference,
        )
        return jnp.where(is_active, data.weight * terms.loss, 0.0)

    return of


def logits_problem(
    case: GradientCase, *, tokens: int, vocab: int, dtype: str, seed: int
) -> Problem:
    """Random logits of a standard deviation of 3.

    Args:
        tokens: a multiple of BATCH.
        vocab: at least 16.
        dtype: `float32` or `bfloat16`, of the arrays.
    """
    rng = np.random.default_rng(seed)
    logits_NV = rng.normal(0, 3, (tokens, vocab)).astype(np.float32)
    ids_N = _draw(rng, logits_NV)
    if case.hard:
        logits_NV[rng.random(logits_NV.shape) < 0.01] = -np.inf
        logits_NV[2, ids_N[2]] = -np.inf
        logits_NV[:, 0] = 0.0
    return make_problem(case, {"logits": logits_NV}, ids_N, dtype=dtype, rng=rng)


def head_problem(
    case: GradientCase, *, tokens: int, width: int, vocab: int, dtype: str, seed: int
) -> Problem:
    """Random hidden states and a head, whose logits have a standard deviation of 3."""
    rng = np.random.default_rng(seed)
    hidden_ND = rng.normal(0, 1, (tokens, width)).astype(np.float32)
    head_VD = rng.normal(0, 3 / width**0.5, (vocab, width)).astype(np.float32)
    ids_N = _draw(rng, hidden_ND @ head_VD.T)
    return make_problem(case, {"hidden": hidden_ND, "head": head_VD}, ids_N, dtype=dtype, rng=rng)


def make_problem(
    case: GradientCase,
    arrays: dict[str, np.ndarray],
    ids_N: np.ndarray,
    *,
    dtype: str,
    rng: np.random.Generator,
) -> Problem:
    """A case on given arrays, with random data of its tokens and the exact gradient.

    Args:
        arrays: as Problem has them, float32. They are rounded to `dtype` first, and are then what
            truth is worked out from.
    """
    rounded = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    wide = {name: np.asarray(array).astype(np.float64) for name, array in rounded.items()}
    logits_NV = wide["logits"] if "logits" in wide else wide["hidden"] @ wide["head"].T
    V = logits_NV.shape[1]
    valid_vocab = V - 7 if case.hard else V
    if case.hard:
        ids_N = ids_N.copy()
        ids_N[[3, 4, 5]] = -1, valid_vocab, V + 3
    support = {"temperature": case.temperature, "valid_vocab": valid_vocab}
    scores = float64_reference.scores(logits_NV, ids_N, **support)
    data = _token_data(case, scores.logprob, rng)
    slopes = float64_reference.cotangents(token_objective(case.objective), scores, data)
    d_logits_NV = float64_reference.logits_gradient(
        logits_NV, np.arange(V), ids_N, scores, slopes, **support
    )
    expected = {"logits": d_logits_NV}
    if "head" in wide:
        expected = {"hidden": d_logits_NV @ wide["head"], "head": d_logits_NV.T @ wide["hidden"]}
    return Problem(
        case=case,
        arrays=rounded,
        ids=jnp.asarray(ids_N, jnp.int32),
        data=data,
        valid_vocab=valid_vocab,
        expected_loss=float(slopes.loss.sum()),
        loss_scale=float(np.abs(slopes.loss).sum()),
        expected=expected,
    )


def _draw(rng, logits_NV):
    """A token of each row's distribution."""
    return (logits_NV + rng.gumbel(size=logits_NV.shape)).argmax(axis=1)


def _token_data(case: GradientCase, logprob_N: np.ndarray, rng: np.random.Generator) -> CaseTokens:
    N = len(logprob_N)
    known_N = np.where(np.isfinite(logprob_N), logprob_N, -5.0)
    behavior_N = known_N + rng.normal(0, 0.3, N)
    reference_N = known_N + rng.normal(0, 0.5, N)
    advantage_N = rng.normal(0, 1, N)
    weight_N = np.ones(N)
    if case.hard:
        behavior_N[6:10] += -30.0, 30.0, -10.0, 10.0
        behavior_N[10:14] += -30.0, 30.0, -10.0, 10.0
        advantage_N[6:14] = [1.0] * 4 + [-1.0] * 4
        advantage_N[14:20] = 0.0
    if case.masked:
        lengths = np.linspace(1, N // BATCH, BATCH).astype(int)
        weight_N = np.concatenate(
            [
                np.where(np.arange(N // BATCH) < length, token_weight(int(length), "seq_mean"), 0.0)
                for length in lengths
            ]
        )
        for array in (behavior_N, reference_N, advantage_N):
            array[weight_N == 0] = np.nan
    arrays = (behavior_N, reference_N, advantage_N, weight_N)
    return CaseTokens(*(jnp.asarray(each, jnp.float32) for each in arrays))
