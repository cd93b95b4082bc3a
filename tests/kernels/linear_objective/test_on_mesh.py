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
    everything,
    objective,
    problem,
)

pytestmark = pytest.mark.slow

TOKENS = ("data", "fsdp")
MESHES = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 2), (8, 1, 1), (1, 1, 8)]


def make_mesh(shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, (*TOKENS, "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def whole():
    arguments = problem(T=40, V=56)
    one = lambda *given: head_ops.linear_objective(*given, objective, HeadOptions(**SUPPORT))
    return arguments, everything(one, arguments, (1.0, 0.5, 0.25))


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize(
    "impl, schedule, vocab_axis",
    [
        ("xla", "fast", "tensor"),
        ("xla", "lean", None),
        ("pallas_interpret", "fast", "tensor"),
        ("pallas_interpret", "lean", "tensor"),
    ],
)
def test_head_has_one_gradient_on_every_mesh(whole, shape, impl, schedule, vocab_axis):
    arguments, expected = whole
    options = HeadOptions(
        impl=impl, schedule=schedule, vocab_axis=vocab_axis, chunk_tokens=8, **SUPPORT
    )
    actual = everything(
        lambda *given: head_ops.linear_objective(
            *given, objective, options, mesh=make_mesh(shape), token_axes=TOKENS
        ),
        arguments,
        (1.0, 0.5, 0.25),
    )
    assert_same(actual, expected, **TIGHT)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("impl", ["xla", "pallas_interpret"])
def test_logits_have_one_gradient_on_every_mesh(shape, impl):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 3, (8, 3, 56)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 54, (8, 3)))
    cotangents = jnp.asarray(rng.normal(size=(3, 8, 3)), jnp.float32)

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
