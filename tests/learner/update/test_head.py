"""The head's gradient in the train step is one, however mesh and matrix are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels.linear_objective import reference
from learner.update.head import HeadPlan, PolicyHead
from learner.update.mesh import AXES, make_mesh
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
    hidden, data = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (hidden, data))
    head = jnp.asarray(rng.normal(size=(V, D)) * 0.5, jnp.float32)
    return hidden, head, jnp.asarray(rng.integers(0, V, (B, T))), data


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
    accumulated = jax.tree.map(jnp.ones_like, params)
    return jax.jit(step)(params, accumulated, hidden, ids, data)


@pytest.mark.parametrize("schedule", ["logits", "fast", "lean"])
@pytest.mark.parametrize(
    "V, D, cut",
    [(24, 8, P("fsdp", None)), (23, 8, P(None, "fsdp")), (23, 7, P())],
    ids=["by rows", "by columns", "whole"],
)
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_every_cut_of_the_head_gives_one_gradient(schedule, V, D, cut, shape):
    hidden, head, ids, data = problem(V, D)
    assert param_specs({"lm_head": {"weight": head}}, shape[1])["lm_head"]["weight"] == cut
    flat = lambda x: x.reshape(B * T, *x.shape[2:])
    active = data["weight"] > 0

    def total(hidden, head):
        out = reference.linear_objective(
            flat(hidden),
            head,
            flat(ids),
            flat(active),
            jax.tree.map(flat, data),
            objective,
            temperature=0.8,
        )
        return out.loss, out

    (_, expected), (d_hidden, d_head) = jax.value_and_grad(total, (0, 1), has_aux=True)(
        hidden, head
    )
    scores, actual_hidden, actual_head, alone = run(schedule, hidden, head, ids, data, shape=shape)
    # Float32 sums in another order.
    close = dict(rtol=2e-5, atol=2e-5)
    for found in (scores, alone):
        np.testing.assert_allclose(
            np.where(active, found.logprob, 0), expected.logprob_T.reshape(B, T), **close
        )
        np.testing.assert_allclose(
            np.where(active, found.entropy, 0), expected.entropy_T.reshape(B, T), **close
        )
    np.testing.assert_allclose(actual_hidden, d_hidden, **close)
    np.testing.assert_allclose(actual_head - 1.0, d_head, **close)
