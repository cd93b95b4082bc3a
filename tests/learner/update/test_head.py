"""The head's gradient in the train step is one, however mesh and matrix are cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels.linear_objective import reference
from learner.update.head import HeadPlan, PolicyHead
from learner.update.mesh import AXES, SHARDS, make_mesh
from learner.update.sharding import make_gather, param_specs

pytestmark = pytest.mark.slow

B, T = 8, 6


def objective(logprob, entropy, data):
    return data["weight"] * (-jnp.exp(logprob - data["behavior"]) * data["sign"] - 0.1 * entropy)


def problem(V, D):
    rng = np.random.default_rng(V)
    weight = np.where(rng.random((B, T)) < 0.5, rng.random((B, T)), 0.0)
    weight[0] = 0.0  # a device whose own tokens all lie idle
    data = {
        "weight": weight,
        "behavior": rng.normal(size=(B, T)) - 3,
        "sign": rng.choice([-1.0, 1.0], (B, T)),
    }
    hidden = rng.normal(size=(B, T, D))
    hidden, data = jax.tree.map(lambda x: np.asarray(x, np.float32), (hidden, data))
    head = np.asarray(rng.normal(size=(V, D)) * 0.5, np.float32)
    return hidden, head, rng.integers(0, V, (B, T)), data


@functools.cache
def expected(V, D):
    """Loss and scores of `problem(V, D)`, and the gradients in hidden and head."""
    hidden, head, ids, data = problem(V, D)
    flat = lambda x: x.reshape(B * T, *x.shape[2:])

    def total(hidden, head):
        out = reference.linear_objective(
            flat(hidden),
            head,
            flat(ids),
            flat(data["weight"] > 0),
            jax.tree.map(flat, data),
            objective,
            temperature=0.8,
        )
        return out.loss, out

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, head)


def run(schedule, hidden, head, ids, data, *, shape, impl="xla"):
    """Scores, hidden gradient and accumulated head gradient (from 1.0) of the whole batch."""
    mesh = make_mesh(data=shape[0], fsdp=shape[1], devices=jax.devices()[: shape[0] * shape[1]])
    params = {"lm_head": {"weight": head}}
    specs = param_specs(params, shape[1])
    plan = HeadPlan(schedule=schedule, impl=impl, temperature=0.8, valid_vocab=None)
    policy_head = PolicyHead(plan, mesh, specs, make_gather(specs, jnp.dtype("float32")))

    def local(params, accumulated, hidden, ids, data):
        active = data["weight"] > 0
        scores, d_hidden, d_head = policy_head.gradients(
            params, hidden, ids, active, data, objective, accumulated
        )
        return scores, d_hidden, d_head, policy_head.scores(params, hidden, ids, active)

    rows = P(AXES)
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, specs, rows, rows, rows),
        out_specs=(rows, rows, specs["lm_head"]["weight"], rows),
        check_vma=False,
    )
    accumulated = jax.tree.map(np.ones_like, params)
    return jax.jit(step)(params, accumulated, hidden, ids, data)


SIZES = {P(SHARDS, None): (24, 8), P(None, SHARDS): (23, 8), P(): (23, 7)}
"""V and D of a head that is cut by rows, by columns, and not at all."""


@pytest.mark.parametrize(
    "schedule, cut, shape",
    [
        ("fast", P(SHARDS, None), (1, 4)),  # added to what is there, in place
        ("lean", P(SHARDS, None), (2, 2)),  # rows kept apart, copies of them to be added up
        ("logits", P(SHARDS, None), (2, 2)),  # gathered, and its gradient scattered by rows
        ("logits", P(None, SHARDS), (1, 4)),
        ("fast", P(None, SHARDS), (2, 2)),
        ("lean", P(), (2, 2)),
    ],
)
def test_every_cut_of_the_head_gives_one_gradient(schedule, cut, shape):
    V, D = SIZES[cut]
    hidden, head, ids, data = problem(V, D)
    assert param_specs({"lm_head": {"weight": head}}, shape[1])["lm_head"]["weight"] == cut
    active = data["weight"] > 0
    (_, out), (d_hidden, d_head) = expected(V, D)
    scores, actual_hidden, actual_head, alone = run(schedule, hidden, head, ids, data, shape=shape)
    # Float32 sums in another order.
    close = dict(rtol=2e-5, atol=2e-5)
    for found in (scores, alone):
        np.testing.assert_allclose(
            np.where(active, found.logprob, 0), out.logprob_T.reshape(B, T), **close
        )
        np.testing.assert_allclose(
            np.where(active, found.entropy, 0), out.entropy_T.reshape(B, T), **close
        )
    np.testing.assert_allclose(actual_hidden, d_hidden, **close)
    np.testing.assert_allclose(actual_head - 1.0, d_head, **close)
