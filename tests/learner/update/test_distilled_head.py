"""The head's gradient beside a teacher is one, however mesh and matrices are cut."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels.linear_distillation import reference
from learner.update.distilled_head import DistilledHead, TeacherPlan, teacher_specs
from learner.update.head import HeadPlan
from learner.update.mesh import AXES, SHARDS, make_mesh
from learner.update.sharding import param_specs
from tests.learner.builders import TINY

pytestmark = pytest.mark.slow

B, T, COEF = 8, 6, 0.7


class Tokens(NamedTuple):
    """Stands for a micro-batch: the teacher's hidden states are given."""

    teacher: np.ndarray
    weights: np.ndarray


def objective(logprob, entropy, data):
    return data["weight"] * (-jnp.exp(logprob - data["behavior"]) - 0.1 * entropy)


@functools.cache
def problem(V, D, E):
    rng = np.random.default_rng(V + E)
    weight = np.where(rng.random((B, T)) < 0.5, rng.random((B, T)), 0.0)
    weight[0] = 0.0  # a device whose own tokens all lie idle
    data = {"weight": weight, "behavior": rng.normal(size=(B, T)) - 3}
    hidden, teacher = rng.normal(size=(B, T, D)), rng.normal(size=(B, T, E))
    heads = [rng.normal(size=(V, X)) * 0.5 for X in (D, E)]
    floats = jax.tree.map(lambda x: np.asarray(x, np.float32), (hidden, teacher, *heads, data))
    return *floats, rng.integers(0, V - 1, (B, T))


@functools.cache
def expected(V, D, E, top_k):
    hidden, teacher, head, teacher_head, data, ids = problem(V, D, E)
    flat = lambda x: x.reshape(B * T, *x.shape[2:])

    def total(hidden, head):
        out = reference.linear_distillation(
            *(flat(hidden), head, flat(teacher), teacher_head, flat(ids)),
            *(flat(data["weight"] > 0), jax.tree.map(flat, data), objective),
            COEF * flat(data["weight"]),
            top_k=top_k,
            temperature=0.8,
            valid_vocab=V - 1,
        )
        return out.loss, out

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, head)


@pytest.mark.parametrize(
    "schedule, top_k, sizes, shape, cut",
    [
        ("fast", None, (24, 8, 12), (1, 4), P(SHARDS, None)),
        ("lean", 3, (24, 8, 12), (2, 2), P(SHARDS, None)),
        ("logits", 3, (24, 8, 12), (2, 2), P(SHARDS, None)),
        (
            "fast",
            3,
            (24, 8, 32),
            (1, 4),
            P(SHARDS, None),
        ),  # a teacher wider than that
        ("lean", None, (24, 32, 8), (2, 2), P(None, SHARDS)),  # and so may the policy be
        ("fast", 3, (23, 7, 8), (2, 2), P()),
    ],
)
def test_every_cut_of_the_heads_gives_one_gradient(schedule, top_k, sizes, shape, cut):
    hidden, teacher, head, teacher_head, data, ids = problem(*sizes)
    mesh = make_mesh(data=shape[0], fsdp=shape[1], devices=jax.devices()[: shape[0] * shape[1]])
    params, teacher_params = (
        {"lm_head": {"weight": head}},
        {"embed_tokens": {"weight": teacher_head}},
    )
    specs = param_specs(params, shape[1])
    assert specs["lm_head"]["weight"] == cut
    of_teacher = teacher_specs(teacher_params, specs, shape[1])
    policy_head = DistilledHead(
        HeadPlan(schedule=schedule, impl="xla", temperature=0.8, valid_vocab=sizes[0] - 1),
        mesh,
        specs,
        jnp.dtype("float32"),
        TeacherPlan(config=TINY, specs=of_teacher, coef=COEF, top_k=top_k),
        lambda params, batch: batch.teacher,
    )

    def local(params, teacher_params, accumulated, hidden, ids, data, batch):
        active = batch.weights > 0
        return policy_head.distilled_gradients(
            params, hidden, ids, active, data, objective, accumulated, batch, teacher_params
        )

    rows = P(AXES)
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, of_teacher, specs, rows, rows, rows, rows),
        out_specs=(rows, rows, rows, specs["lm_head"]["weight"]),
        check_vma=False,
    )
    scores, divergence, d_hidden, d_head = jax.jit(step)(
        params,
        teacher_params,
        jax.tree.map(np.ones_like, params),
        hidden,
        ids,
        data,
        Tokens(teacher, data["weight"]),
    )
    (_, out), (expected_hidden, expected_head) = expected(*sizes, top_k)
    # Float32 sums in another order.
    close = dict(rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(divergence, out.divergence_T.reshape(B, T), **close)
    np.testing.assert_allclose(scores.logprob, out.logprob_T.reshape(B, T), **close)
    np.testing.assert_allclose(d_hidden, expected_hidden, **close)
    np.testing.assert_allclose(d_head - 1.0, expected_head, **close)
