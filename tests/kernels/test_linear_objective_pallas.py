"""The head's TPU kernels, interpreted on CPU; and, where the compiler is there, compiled for v6e.

Dimension key:
    C: tokens of a chunk
    D: model width
    V: rows of the head
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear_objective import pallas_tpu, xla
from kernels.token_logprob.reference import TokenLogprob
from kernels.token_logprob.statistics import Support, finish, slopes

TILE = 16
score = functools.partial(pallas_tpu.score, interpret=True, tile_rows=TILE)
gradient = functools.partial(pallas_tpu.gradient, interpret=True, tile_rows=TILE)


def problem(C, D, V, dtype=jnp.float32, seed=0):
    """Hidden, head and ids; logits of a few nats."""
    rng = np.random.default_rng(seed)
    hidden_CD = jnp.asarray(rng.normal(size=(C, D)), dtype)
    head_VD = jnp.asarray(rng.normal(size=(V, D)) * 3 / D**0.5, dtype)
    return hidden_CD, head_VD, jnp.asarray(rng.integers(0, V, C), jnp.int32)


def cotangents(C, seed=1):
    return TokenLogprob(*np.random.default_rng(seed).normal(size=(3, C)).astype(np.float32))


def both_passes(
    passes_score, passes_gradient, hidden_CD, head_VD, ids_C, support, *, keep, **first
):
    """Scores, d_hidden and d_head of one chunk, by these two passes."""
    found, kept = passes_score(hidden_CD, head_VD, ids_C, support, keep=keep, **first)
    scored = finish(found, ids_C, support)
    slope = slopes(scored, cotangents(len(ids_C)), support)
    start_VD = jnp.full(head_VD.shape, 0.5, jnp.float32)
    d_hidden_CD, d_head_VD = passes_gradient(
        hidden_CD, head_VD, ids_C, slope, support, start_VD, kept, **first
    )
    return scored, d_hidden_CD, d_head_VD


def assert_same(actual, expected, tolerance):
    """Within `tolerance` of the largest entry of each array."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        size = np.abs(other, where=np.isfinite(other), out=np.zeros(other.shape)).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("keep", [True, False], ids=["fast", "lean"])
@pytest.mark.parametrize("C, D, V", [(13, 24, 53), (300, 8, 32)])
def test_passes_equal_those_of_xla(C, D, V, keep):
    hidden_CD, head_VD, ids_C = problem(C, D, V)
    support = Support(0.7, V - 3)
    ids_C = ids_C.at[:4].set(jnp.array([-1, V - 2, V, V + 5]))
    expected = both_passes(xla.score, xla.gradient, hidden_CD, head_VD, ids_C, support, keep=keep)
    actual = both_passes(score, gradient, hidden_CD, head_VD, ids_C, support, keep=keep)
    # float32 both, sums in another order.
    assert_same(actual, expected, 2e-6)
