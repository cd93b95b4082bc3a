"""One loss, one gradient on any mesh: tokens over (data, fsdp), vocabulary over tensor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from kernels.linear_objective import ops as head_ops
from kernels.linear_objective.ops import HeadOptions
from kernels.token_logprob import ops as logits_ops
from tests.kernels.linear_objective.test_linear_objective import (
    SUPPORT,
    TIGHT,
    assert_same,
    defined,
    everything,
    objective,
    problem,
)

pytestmark = pytest.mark.slow

TOKENS = ("data", "fsdp")
WEIGHTS = (1.0, 0.5, 0.25)
"""Of loss, logprobs and entropies: both passes of the gradient count."""


def make_mesh(shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, (*TOKENS, "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    "impl, schedule, vocab_axis, shape",
    # All three axes cut, for XLA and for the kernels; one axis over all devices, the tokens over
    # either axis alone and over both, a vocabulary that is whole on an axis of two.
    [
        ("xla", "fast", "tensor", (2, 2, 2)),
        ("xla", "fast", "tensor", (1, 1, 8)),
        ("xla", "lean", None, (1, 2, 2)),
        ("xla", "lean", None, (8, 1, 1)),
        ("pallas_interpret", "fast", "tensor", (2, 1, 4)),
        ("pallas_interpret", "lean", "tensor", (2, 2, 2)),
    ],
)
def test_head_has_one_gradient_on_every_mesh(impl, schedule, vocab_axis, shape):
    arguments = problem(T=40, V=56)
    options = HeadOptions(
        impl=impl, schedule=schedule, vocab_axis=vocab_axis, chunk_tokens=8, **SUPPORT
    )
    run = everything(
        lambda *given: head_ops.linear_objective(
            *given, objective, options, mesh=make_mesh(shape), token_axes=TOKENS
        ),
        WEIGHTS,
    )
    assert_same(run(*arguments), defined(*WEIGHTS)(*arguments), **TIGHT)


@pytest.mark.parametrize(
    "impl, shape",
    [
        ("xla", (2, 2, 2)),
        ("xla", (1, 1, 8)),
        ("pallas_interpret", (2, 2, 2)),
        ("pallas_interpret", (8, 1, 1)),
    ],
)
def test_logits_have_one_gradient_on_every_mesh(impl, shape):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (8, 3, 56)).astype(np.float32)
    ids = rng.integers(0, 54, (8, 3))
    cotangents = rng.normal(size=(3, 8, 3)).astype(np.float32)

    def value_and_gradient(**how):
        def total(logits):
            out = logits_ops.token_logprob(logits, ids, temperature=0.7, valid_vocab=54, **how)
            return sum((c * each).sum() for c, each in zip(cotangents, out, strict=True)), out

        return jax.jit(jax.value_and_grad(total, has_aux=True))(logits)

    mesh = make_mesh(shape)
    actual = value_and_gradient(impl=impl, mesh=mesh, token_axes=TOKENS, vocab_axis="tensor")
    assert_same(actual, value_and_gradient(), rtol=1e-5, atol=1e-5)


def test_sizes_that_the_mesh_cannot_cut_are_refused():
    mesh = make_mesh((2, 1, 4))
    for T, V, message in [(39, 56, "tokens of 39 .* 2 equal"), (40, 54, "of 54 .* 4 equal")]:
        with pytest.raises(ValueError, match=message):
            head_ops.linear_objective(
                *problem(T=T, V=V),
                objective,
                HeadOptions(vocab_axis="tensor"),
                mesh=mesh,
                token_axes=TOKENS,
            )
    with pytest.raises(ValueError, match="an axis cuts one of them"):
        head_ops.linear_objective(
            *problem(T=40, V=56),
            objective,
            HeadOptions(vocab_axis="fsdp"),
            mesh=mesh,
            token_axes=TOKENS,
        )
    with pytest.raises(ValueError, match="an axis cuts one of them"):
        logits_ops.token_logprob(
            jnp.zeros((2, 4)),
            jnp.zeros(2, jnp.int32),
            mesh=mesh,
            token_axes=TOKENS,
            vocab_axis="data",
        )
    with pytest.raises(ValueError, match=r"\['rows'\] are not among"):
        logits_ops.token_logprob(
            jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32), mesh=mesh, token_axes=("rows",)
        )
