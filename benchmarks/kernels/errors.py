"""How far the results of a bench program are from float64.

The rows of a subset of tokens are recomputed in float64 from the very inputs. The head's gradient
sums over all tokens; it is recomputed for a subset of the vocabulary, from each token's normaliser
and entropy as float32 sums have them, whose own distance from float64 is stated.

Dimension key:
    B: sequences
    T: tokens of each
    N: tokens
    A: tokens that count
    S: tokens of the subset
    R: rows of the head in the subset
    D: model width
    V: vocabulary
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float64_reference
from benchmarks.kernels.case import Case
from benchmarks.kernels.competitors import HeadInputs, LogitsInputs, objective_of
from kernels.token_logprob.reference import TokenLogprob

ROWS_AT_ONCE = 4096
"""Rows of the head that are in float64 at once."""


def logits_errors(
    case: Case, inputs: LogitsInputs, outputs: Any, check_tokens: int
) -> dict[str, Any]:
    """Errors of a logits program.

    Args:
        outputs: loss, loss_BT, d_logits.
        check_tokens: size of the subset; 0 leaves the subset's errors out.
    """
    loss, loss_BT, d_logits_BTV = outputs
    errors = _sum_error(loss, loss_BT)
    token_S = _subset(case, case.tokens, check_tokens)
    if not len(token_S):
        return errors
    place = np.unravel_index(token_S, (case.batch, case.time))
    rows = lambda array: np.asarray(array[place])
    logits_SV, ids_S = rows(inputs.logits_BTV), rows(inputs.ids_BT)
    support = {"temperature": case.temperature, "valid_vocab": case.vocab}
    scores = float64_reference.scores(logits_SV, ids_S, **support)
    slopes = float64_reference.cotangents(
        objective_of(case), scores, jax.tree.map(lambda leaf: leaf[place], inputs.data)
    )
    d_logits_SV = float64_reference.logits_gradient(
        logits_SV, np.arange(case.vocab), ids_S, scores, slopes, **support
    )
    return errors | {
        "checked_tokens": len(token_S),
        "loss": _distance(rows(loss_BT), slopes.loss),
        "logits_grad": _distance(rows(d_logits_BTV), d_logits_SV),
    }


def head_errors(
    case: Case,
    inputs: HeadInputs,
    scored: TokenLogprob,
    outputs: Any,
    check_tokens: int,
) -> dict[str, Any]:
    """Errors of a head program.

    Args:
        scored: float32 [N]; what the policy says of the tokens, from sums in float32.
        outputs: loss, loss_N, d_hidden, head_grad, the last having started from zeros.
        check_tokens: size of the subset of tokens, and of that of the vocabulary; 0 leaves
            their errors out.
    """
    loss, loss_N, d_hidden_ND, head_grad_VD = outputs
    errors = _sum_error(loss, loss_N)
    N = len(inputs.ids_N)
    token_A = np.arange(N) if inputs.active_N is None else np.flatnonzero(inputs.active_N)
    token_S = token_A[_subset(case, len(token_A), check_tokens)]
    if not len(token_S):
        return errors
    scores, slopes, d_logits_SV = _exact_rows(case, inputs, token_S)
    d_hidden_SD = _times_head(d_logits_SV, inputs.head_VD)
    expected_RD, row_R = _exact_head_rows(case, inputs, scored, token_A, check_tokens)
    errors |= {
        "checked_tokens": len(token_S),
        "checked_head_rows": len(row_R),
        "loss": _distance(loss_N[token_S], slopes.loss),
        "hidden_grad": _distance(d_hidden_ND[token_S], d_hidden_SD),
        "head_grad": _distance(head_grad_VD[row_R], expected_RD),
        "float32_logsumexp_abs": float(
            np.abs(np.asarray(scored.logsumexp[token_S]) - scores.logsumexp).max()
        ),
    }
    if inputs.active_N is not None:
        padding_is_zero = ~jnp.any(jnp.where(inputs.active_N[:, None], 0, d_hidden_ND) != 0)
        errors["padding_grad_is_zero"] = bool(padding_is_zero)
    return errors


def _exact_rows(case, inputs, token_S):
    """Scores, cotangents and the logits' gradient of some tokens."""
    hidden_SD = _float64(inputs.hidden_ND[token_S])
    logits_SV = np.concatenate(
        [hidden_SD @ _float64(part_RD).T for part_RD in _parts(inputs.head_VD)], axis=1
    )
    ids_S = np.asarray(inputs.ids_N[token_S])
    support = {"temperature": case.temperature, "valid_vocab": case.vocab}
    scores = float64_reference.scores(logits_SV, ids_S, **support)
    slopes = float64_reference.cotangents(objective_of(case), scores, _take(inputs.data, token_S))
    column_V = np.arange(case.vocab)
    d_logits_SV = float64_reference.logits_gradient(
        logits_SV, column_V, ids_S, scores, slopes, **support
    )
    return scores, slopes, d_logits_SV


def _exact_head_rows(case, inputs, scored, token_A, check_rows):
    """The gradient of some rows of the head, half of them rows of tokens that occur."""
    rng = np.random.default_rng(case.seed)
    ids_A = np.asarray(inputs.ids_N[token_A])
    wanted = [rng.choice(ids_A, check_rows), rng.integers(0, case.vocab, check_rows)]
    row_R = np.unique(np.concatenate(wanted))
    scores = float64_reference.Scores(*(_float64(each[token_A]) for each in scored))
    slopes = float64_reference.cotangents(objective_of(case), scores, _take(inputs.data, token_A))
    hidden_AD = _float64(inputs.hidden_ND[token_A])
    logits_AR = hidden_AD @ _float64(inputs.head_VD[row_R]).T
    d_logits_AR = float64_reference.logits_gradient(
        logits_AR,
        row_R,
        ids_A,
        scores,
        slopes,
        temperature=case.temperature,
        valid_vocab=case.vocab,
    )
    return d_logits_AR.T @ hidden_AD, row_R


def _subset(case, tokens, check_tokens):
    rng = np.random.default_rng(case.seed)
    return np.sort(rng.choice(tokens, min(tokens, check_tokens), replace=False))


def _sum_error(loss, loss_N):
    """The loss against the sum of its terms, in units of the sum of their sizes."""
    terms_N = _float64(loss_N)
    size = np.abs(terms_N).sum()
    return {"loss_sum_rel": float(abs(float(loss) - terms_N.sum()) / size) if size else 0.0}


def _times_head(d_logits_SV, head_VD):
    parts = zip(range(0, len(head_VD), ROWS_AT_ONCE), _parts(head_VD), strict=True)
    products = (d_logits_SV[:, at : at + len(part)] @ _float64(part) for at, part in parts)
    return sum(products, start=np.zeros((len(d_logits_SV), head_VD.shape[1])))


def _parts(head_VD):
    for start in range(0, len(head_VD), ROWS_AT_ONCE):
        yield head_VD[start : start + ROWS_AT_ONCE]


def _take(data, token_N):
    return jax.tree.map(lambda leaf: leaf[token_N], data)


def _float64(array):
    return np.asarray(array).astype(np.float64)


def _distance(actual, expected):
    return float64_reference.distance(actual, expected)._asdict()
