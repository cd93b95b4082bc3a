"""Attention in the gradient check: rows that pack sequences in every way that has borders.

Dimension key: that of kernels/packed_attention/reference.py, and
    M: tokens of all rows
    X: values of one token
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float64_attention, float64_reference
from benchmarks.float64_attention import AttentionGradients
from benchmarks.gradcheck.gradient_errors import GradientError, Tolerance, judge
from kernels.packed_attention.ops import packed_attention

ROWS = ((255, 1, 1, 256, 60), (600,), ())
"""Segments by length; what they leave of a row is padding. Blocks are of 256 tokens, or more."""
TOKENS, HEADS, KV_HEADS, HEAD_SIZE = 600, 4, 2, 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionGradientCase:
    """What limits whom a token sees."""

    name: str
    window: int | None = None
    soft_cap: float | None = None


ATTENTION_CASES = (
    AttentionGradientCase(name="attention"),
    AttentionGradientCase(name="attention_window", window=100),
    AttentionGradientCase(name="attention_soft_cap", soft_cap=2.0),
)


def check_attention(
    case: AttentionGradientCase,
    impls: Iterable[str],
    *,
    dtype: str,
    tolerance: Tolerance,
    seed: int,
) -> Iterator[GradientError]:
    """The output, and the gradients of its inner product with a random array, by each impl."""
    segment_BT, arrays = _problem(dtype, seed)
    options = {"window": case.window, "soft_cap": case.soft_cap}
    query, key, value, d_out = arrays
    truth = float64_attention.value_and_gradients(
        np.asarray(query),
        np.asarray(key),
        np.asarray(value),
        segment_BT,
        np.asarray(d_out),
        **options,
    )
    terms = truth.out * np.asarray(d_out).astype(np.float64)
    for impl in impls:
        attend = functools.partial(packed_attention, operand_dtype=dtype, impl=impl, **options)

        @jax.jit
        def differentiate(query, key, value, d_out, attend=attend):
            of = lambda query, key, value: attend(query, key, value, jnp.asarray(segment_BT))
            out, pull = jax.vjp(of, query, key, value)
            return AttentionGradients(out, *pull(d_out))

        found = differentiate(*arrays)
        loss = (np.asarray(found.out).astype(np.float64) * np.asarray(d_out)).sum()
        loss_error = float(abs(loss - terms.sum()) / np.abs(terms).sum())
        for name in truth._fields:
            actual = np.asarray(getattr(found, name)).astype(np.float64)
            expected = getattr(truth, name)
            far = float64_reference.distance(actual, expected)
            row = _worst_token(actual, expected, segment_BT != 0)
            measured = {"rel_l2": far.rel_l2, "cosine": 1 - far.cosine, "row": row}
            problems = judge(measured, tolerance, actual)
            yield GradientError(
                case.name,
                dtype,
                f"packed_attention {impl}",
                name,
                loss_error,
                far.rel_l2,
                1 - far.cosine,
                row,
                problems,
            )


def _problem(dtype, seed):
    """Segments, and query, key, value and cotangent of the given dtype."""
    segment_BT = np.zeros((len(ROWS), TOKENS), np.int32)
    for row, lengths in enumerate(ROWS):
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        segment_BT[row, : len(numbers)] = numbers
    rng = np.random.default_rng(seed)
    arrays = [
        jnp.asarray(rng.normal(0, 1, (*segment_BT.shape, heads, HEAD_SIZE)), dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return segment_BT, arrays


def _worst_token(actual, expected, is_token_BT):
    """Largest error of a token, relative to its size; infinite where padding has any value.

    A token of less than the usual size counts as one of the usual size: the query of a token that
    sees itself alone has no gradient, and errs by the rounding of terms that cancel.
    """
    tokens = lambda array: array.reshape(*is_token_BT.shape, -1)[is_token_BT]
    if actual.reshape(*is_token_BT.shape, -1)[~is_token_BT].any():
        return float("inf")
    off_M = np.linalg.norm(tokens(actual - expected), axis=1)
    size_M = np.linalg.norm(tokens(expected), axis=1)
    return float((off_M / np.maximum(size_M, np.median(size_M))).max())
