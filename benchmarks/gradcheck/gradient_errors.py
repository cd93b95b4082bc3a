"""Differentiates a problem by an implementation of its loss, and judges the gradient.

Dimension key:
    N: tokens
    C: columns: of logits, or of hidden states
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float64_reference
from benchmarks.gradcheck.cases import BATCH, Problem, token_objective
from kernels.linear_objective.ops import HeadOptions, linear_objective


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest errors that pass; 0 demands the float64 value itself."""

    loss: float
    """Of the summed loss, in units of the sum of the sizes of its terms."""
    rel_l2: float
    cosine: float
    """Of 1 - cosine."""
    row: float
    """Relative l2 error of the worst token's row, in logits and hidden states."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"tolerance {field.name} must be at least 0, got {value}")


TOLERANCES = {
    "float32": Tolerance(loss=1e-5, rel_l2=5e-5, cosine=2e-9, row=2e-3),
    "bfloat16": Tolerance(loss=1e-5, rel_l2=4e-3, cosine=8e-6, row=3e-2),
}
"""By the dtype of logits, or of hidden states and products. Some three times what is seen: in
float32 the logits of a real model, of size 20, err by some 2e-6, and gradients by a few times
that; in bfloat16 each entry of a gradient is rounded by 1.7e-3 on average, twice on its way to the
hidden states."""
ROW_FLOOR = 0.01


class Candidate(NamedTuple):
    """An implementation of the loss of a problem."""

    name: str
    loss_of: Callable[[Problem, dict[str, jax.Array]], jax.Array]
    """(problem, its arrays) -> the summed loss, differentiable in the arrays."""


class GradientError(NamedTuple):
    """One array of one problem, as a candidate differentiates it."""

    case: str
    dtype: str
    candidate: str
    array: str
    loss_error: float
    rel_l2: float
    cosine_gap: float
    row: float | None
    """None where the array has no rows of tokens."""
    problems: list[str]
    """Why it fails; empty if it passes."""


def logits_candidate(name: str, score: Callable) -> Candidate:
    """A candidate from `score(logits, ids, temperature=, valid_vocab=)` -> TokenLogprob."""

    def loss_of(problem, arrays):
        logits_NV = arrays["logits"] if "logits" in arrays else _logits(**arrays)
        fold = lambda leaf: leaf.reshape(BATCH, -1, *leaf.shape[1:])
        scored = score(fold(logits_NV), fold(problem.ids), **problem.support)
        objective = token_objective(problem.case.objective)
        return objective(scored.logprob, scored.entropy, jax.tree.map(fold, problem.data)).sum()

    return Candidate(name, loss_of)


def _logits(hidden, head):
    return jnp.matmul(hidden, head.astype(hidden.dtype).T, preferred_element_type=jnp.float32)


def head_candidate(impl: str, schedule: str) -> Candidate:
    """A candidate from `linear_objective`; its chunks are small, so that the tokens need many."""

    def loss_of(problem, arrays):
        options = HeadOptions(schedule=schedule, impl=impl, chunk_tokens=16, **problem.support)
        return linear_objective(
            arrays["hidden"],
            arrays["head"],
            problem.ids,
            problem.active_N,
            problem.data,
            token_objective(problem.case.objective),
            options,
        ).loss

    return Candidate(f"linear_objective {impl} {schedule}", loss_of)


def check_gradient(
    problem: Problem, candidate: Candidate, tolerance: Tolerance
) -> list[GradientError]:
    """Differentiates a problem by a candidate; one finding for each array."""
    arrays = dict(problem.arrays)
    dtype = str(next(iter(arrays.values())).dtype)
    if "head" in arrays:  # parameters are float32; they are rounded already, by the problem
        arrays["head"] = arrays["head"].astype(jnp.float32)
    # Where matrix units round float32 operands by default, float32 would not mean float32.
    precise = jax.default_matmul_precision("highest" if dtype == "float32" else "default")
    with precise:
        value_and_grad = jax.jit(jax.value_and_grad(functools.partial(candidate.loss_of, problem)))
        loss, gradients = value_and_grad(arrays)
    loss_error = abs(float(loss) - problem.expected_loss) / problem.loss_scale
    findings = []
    for name, expected in problem.expected.items():
        actual = np.asarray(gradients[name]).astype(np.float64)
        far = float64_reference.distance(actual, expected)
        row = None if name == "head" else worst_row(actual, expected)
        errors = {"loss": loss_error, "rel_l2": far.rel_l2, "cosine": 1 - far.cosine}
        if row is not None:
            errors["row"] = row
        findings.append(
            GradientError(
                problem.case.name,
                dtype,
                candidate.name,
                name,
                loss_error,
                far.rel_l2,
                1 - far.cosine,
                row,
                judge(errors, tolerance, actual),
            )
        )
    return findings


def worst_row(actual_NC: np.ndarray, expected_NC: np.ndarray) -> float:
    """Largest relative l2 error of a row; infinite where a row that should be zero is not.

    A row far below the usual counts as one of ROW_FLOOR of the median: what a token of
    probability near 1 has left is a difference, and errs by more than its size says.
    """
    off_N = np.linalg.norm(actual_NC - expected_NC, axis=1)
    size_N = np.linalg.norm(expected_NC, axis=1)
    if off_N[size_N == 0].any():
        return math.inf
    kept_N = size_N > 0
    least = ROW_FLOOR * np.median(size_N[kept_N])
    return float((off_N[kept_N] / np.maximum(size_N[kept_N], least)).max())


def judge(errors: dict[str, float], tolerance: Tolerance, gradient: np.ndarray) -> list[str]:
    """Why a gradient with these errors fails."""
    problems = [] if gradient.any() else ["the gradient is zero"]
    for name, error in errors.items():
        bound = getattr(tolerance, name)
        if not error <= bound:  # a NaN fails
            problems.append(f"{name} {error:.1e} is above {bound:.1e}")
    return problems
