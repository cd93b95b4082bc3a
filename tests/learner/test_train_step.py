"""One gradient, however it is cut: against a literal computation, over meshes and splits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.token_logprob import reference
from learner import loss as loss_lib
from learner.batching import SelectionRules, pack, select
from learner.head import HeadPlan
from learner.mesh import AXES, make_mesh
from learner.sharding import param_specs, reduce_gradients
from learner.state import init_state, place_params, state_shardings
from learner.train_step import (
    PolicyOptions,
    make_accumulate,
    make_apply,
    make_empty_accumulator,
)
from models.transformer import forward, head_weight, logits, packed_attend
from tests.learner.builders import TINY, host_params, random_groups

HEAD = HeadPlan(schedule="fast", impl="xla", temperature=0.8, valid_vocab=22)
OPTIONS = PolicyOptions(head=HEAD, compute_dtype=jnp.dtype("float32"), remat=False)
OBJECTIVE = loss_lib.Objective(
    clip_low=0.2, clip_high=0.28, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01
)
RULES = SelectionRules(
    advantage="group_norm",
    advantage_eps=1e-6,
    aggregation="seq_mean",
    zero_variance="keep",
    truncated="keep",
    max_completion_tokens=16,
)
# Float32 sums in another order; gradients here are around 0.1.
TOLERANCE = dict(rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def selection():
    return select(random_groups(), RULES, vocab_size=TINY.vocab_size)


def reference_host_params():
    """A reference policy that differs from the policy, so that the KL term has a slope."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf * 1.1), host_params())


@pytest.fixture(scope="module")
def literal(selection):
    """Loss and gradient of the batch, one unpacked sequence at a time on one device."""

    def logprobs(params, sequence):
        ids = jnp.asarray(sequence.token_ids)[None]
        hidden, _ = forward(
            params,
            TINY,
            ids,
            jnp.arange(ids.shape[1])[None],
            packed_attend(jnp.ones_like(ids), operand_dtype=jnp.float32),
            compute_dtype=jnp.float32,
        )
        return reference.token_logprob(
            logits(hidden, head_weight(params)),
            jnp.asarray(sequence.target_ids)[None],
            temperature=HEAD.temperature,
            valid_vocab=HEAD.valid_vocab,
        )

    def loss(params, sequence):
        policy, frozen = logprobs(params, sequence), logprobs(reference_host_params(), sequence)
        terms = loss_lib.token_terms(
            policy.logprob,
            policy.entropy,
            sequence.behavior_logprobs[None],
            jnp.full_like(policy.logprob, sequence.advantage),
            sequence.weights[None] > 0,
            OBJECTIVE,
            frozen.logprob,
        )
        return loss_lib.weighted_sum(terms.loss, sequence.weights[None])

    # One length, so that one compilation serves all: the tail is another segment without weight.
    def padded(sequence):
        rest = 16 - len(sequence.token_ids)
        fields = {
            name: np.pad(getattr(sequence, name), (0, rest))
            for name in ("token_ids", "target_ids", "behavior_logprobs", "weights")
        }
        return type(sequence)(advantage=sequence.advantage, **fields)

    step = jax.jit(
        lambda params, fields, advantage: jax.value_and_grad(loss)(
            params, type(selection.sequences[0])(advantage=advantage, **fields)
        )
    )
    total, total_grad = 0.0, jax.tree.map(np.zeros_like, host_params())
    for sequence in map(padded, selection.sequences):
        fields = {
            name: getattr(sequence, name)
            for name in ("token_ids", "target_ids", "behavior_logprobs", "weights")
        }
        value, grad = step(host_params(), fields, sequence.advantage)
        total += float(value)
        total_grad = jax.tree.map(np.add, total_grad, grad)
    return total, total_grad


def run_accumulate(selection, *, data, fsdp, microbatch_tokens, options=OPTIONS):
    mesh = make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])
    specs = param_specs(host_params(), fsdp)
    params = place_params(host_params(), mesh, specs, jnp.float32)
    frozen = place_params(reference_host_params(), mesh, specs, jnp.float32)
    accumulator = make_empty_accumulator(mesh, specs)(params)
    accumulate = make_accumulate(mesh, specs, TINY, OBJECTIVE, options)
    batches = pack(selection.sequences, microbatch_tokens=microbatch_tokens, devices=data * fsdp)
    compiled = None
    for batch in batches:
        batch = jax.device_put(batch, NamedSharding(mesh, P(AXES)))
        if compiled is None:
            lowered = accumulate.lower(params, frozen, accumulator, batch)
            # Compile time is most of this test; the arithmetic does not change.
            compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        accumulator = compiled(params, frozen, accumulator, batch)
    return len(batches), jax.device_get(accumulator)


def assert_same_gradient(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **TOLERANCE), actual, expected)


@pytest.mark.parametrize(
    "data, fsdp, microbatch_tokens, microbatches",
    [
        (1, 1, 192, 1),
        (1, 1, 16, 10),
        (2, 1, 32, 3),
        (1, 2, 64, 2),
        (4, 1, 16, 3),
        (2, 2, 32, 2),
        (1, 4, 16, 3),
        (8, 1, 16, 2),
        (4, 2, 16, 2),
        (2, 4, 16, 2),
        (1, 8, 16, 2),
    ],
)
def test_any_mesh_and_split_gives_the_literal_loss_and_gradient(
    selection, literal, data, fsdp, microbatch_tokens, microbatches
):
    count, accumulator = run_accumulate(
        selection, data=data, fsdp=fsdp, microbatch_tokens=microbatch_tokens
    )
    assert count == microbatches
    loss, gradient = literal
    np.testing.assert_allclose(accumulator.sums["loss"], loss, rtol=1e-5)
    assert accumulator.sums["active_tokens"] == selection.active_tokens
    assert_same_gradient(accumulator.grads, gradient)


def test_recomputing_layers_changes_nothing(selection, literal):
    head = HEAD._replace(schedule="logits", impl="reference")
    options = OPTIONS._replace(remat=True, head=head)
    _, accumulator = run_accumulate(
        selection, data=1, fsdp=2, microbatch_tokens=64, options=options
    )
    assert_same_gradient(accumulator.grads, literal[1])


def test_bfloat16_compute_stays_near_float32(selection, literal):
    options = OPTIONS._replace(compute_dtype=jnp.dtype("bfloat16"))
    _, accumulator = run_accumulate(
        selection, data=1, fsdp=2, microbatch_tokens=64, options=options
    )
    for leaf in jax.tree.leaves(accumulator.grads):
        assert leaf.dtype == np.float32
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    actual, expected = flat(accumulator.grads), flat(literal[1])
    # Each of a few dozen roundings is off by 2**-9; their sum stays well under 5 percent.
    assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_gradient_has_no_factor_of_the_device_count_K03(devices, cases):
    given, expected = cases("sharding")["K03"]["input"], cases("sharding")["K03"]["expected"]
    mesh = make_mesh(data=devices, fsdp=1, devices=jax.devices()[:devices])
    specs = {"w": P()}

    @jax.shard_map(
        mesh=mesh, in_specs=(specs, P(AXES), P(AXES)), out_specs=(P(), specs), check_vma=False
    )
    def summed(params, x, y):
        local = lambda params: ((params["w"] * x - y) ** 2).sum()
        value, grads = jax.value_and_grad(local)(params)
        return jax.lax.psum(value, AXES), reduce_gradients(grads, specs)

    x, y = jnp.array(given["x"]), jnp.array(given["y"])
    value, grads = jax.jit(summed)({"w": jnp.float32(given["w"])}, x, y)
    np.testing.assert_allclose(value / len(x), expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(grads["w"] / len(x), expected["dloss_dw"], rtol=1e-6)


@pytest.fixture(scope="module")
def small():
    """A state of one matrix and one vector with plain SGD, its accumulator and `apply`."""
    params = {
        "embed_tokens": {"weight": np.ones((4, 2), np.float32)},
        "norm": {"weight": np.ones(2, np.float32)},
    }
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    specs = param_specs(params, 2)
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(schedule, momentum=0.5))
    apply = make_apply(mesh, state_shardings(params, optimizer, mesh, specs), optimizer, schedule)

    def fresh(grad_value, loss=3.0):
        state = init_state(params, optimizer, mesh, specs)
        accumulator = make_empty_accumulator(mesh, specs)(state.params)
        grads = jax.tree.map(lambda leaf: leaf + grad_value, accumulator.grads)
        sums = {**accumulator.sums, "loss": jnp.float32(loss)}
        return state, accumulator._replace(grads=grads, sums=sums)

    return apply, fresh


def test_apply_divides_once_by_the_denominator(small):
    apply, fresh = small
    state, accumulator = fresh(6.0)
    state, report = apply(state, accumulator, jnp.float32(3.0))
    np.testing.assert_allclose(report["loss"], 1.0)
    np.testing.assert_allclose(report["grad_norm"], 2.0 * np.sqrt(10), rtol=1e-6)
    np.testing.assert_allclose(report["learning_rate"], 0.1)
    np.testing.assert_allclose(state.params["norm"]["weight"], [0.8, 0.8], rtol=1e-6)
    np.testing.assert_allclose(state.params["embed_tokens"]["weight"], 0.8, rtol=1e-6)
    assert state.update_count == 1
    _, report = apply(state, fresh(0.0)[1], jnp.float32(3.0))
    np.testing.assert_allclose(report["learning_rate"], 0.09, rtol=1e-6)


@pytest.mark.parametrize(
    "gradient, loss", [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, -np.inf)]
)
def test_update_that_is_not_finite_leaves_everything_as_it_was(small, gradient, loss):
    apply, fresh = small
    state, accumulator = fresh(gradient, loss)
    before = jax.device_get(state)
    state, report = apply(state, accumulator, jnp.float32(1.0))
    assert report["skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
