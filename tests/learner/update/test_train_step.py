"""One gradient, however it is cut: against a literal computation, over meshes and splits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.packed_attention.ops import WHOLE_SCORES
from kernels.token_logprob import reference
from learner.objective import loss as loss_lib
from learner.objective.batching import Packing, pack, select_sequences, unpack
from learner.objective.off_policy import Correction, correct_selection, weigh_sequence
from learner.update.head import HeadPlan
from learner.update.mesh import AXES, make_mesh
from learner.update.sharding import param_specs, reduce_gradients
from learner.update.state import init_state, place_params, state_shardings
from learner.update.train_step import (
    PolicyOptions,
    make_accumulate,
    make_apply,
    make_empty_accumulator,
    make_score,
)
from models.layer_scan import Remat
from models.transformer import forward, head_weight, logits, packed_attend
from tests.learner import builders
from tests.learner.builders import TINY, host_params, random_groups

pytestmark = pytest.mark.slow

HEAD = HeadPlan(schedule="fast", impl="xla", temperature=0.8, valid_vocab=22)
OPTIONS = PolicyOptions(
    head=HEAD, attention=WHOLE_SCORES, compute_dtype=jnp.dtype("float32"), remat=Remat.NONE
)
OBJECTIVE = loss_lib.Objective(
    clip_low=0.2, clip_high=0.28, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01
)
RULES = builders.RULES._replace(aggregation="seq_mean")
# Float32 sums in another order; gradients here are around 0.1.
TOLERANCE = dict(rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def selection():
    """Corrected for a policy that has moved: token weights differ, and some sequences are gone.

    An environment wrote a part of some.
    """
    groups = random_groups(7, episodes=True)
    assert 5 < sum(bool(c.segment_tokens) for group in groups for c in group.completions) < 25
    sampled = select_sequences(groups, RULES, vocab_size=TINY.vocab_size)
    correction = Correction(token_truncate=1.2, sequence_low=0.9, sequence_high=1.3)
    rng = np.random.default_rng(5)
    weights = [
        weigh_sequence(s, np.float32(-3 + rng.normal(0, 0.3, len(s.weights))), correction)
        for s in sampled.sequences
    ]
    corrected = correct_selection(sampled, weights, correction, RULES)
    assert 15 < len(corrected.sequences) < len(sampled.sequences)
    assert len({w for s in corrected.sequences for w in s.importance[s.active]}) > 10
    return corrected


def reference_host_params():
    """A reference policy that differs from the policy, so that the KL term has a slope."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf * 1.1), host_params())


@pytest.fixture(scope="module")
def literal(selection):
    """Loss, gradient and logprobs of the batch, one unpacked sequence at a time on one device."""

    def logprobs(params, fields):
        ids = fields["token_ids"][None]
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
            fields["target_ids"][None],
            temperature=HEAD.temperature,
            valid_vocab=HEAD.valid_vocab,
        )

    def loss(params, fields, advantage):
        policy, frozen = logprobs(params, fields), logprobs(reference_host_params(), fields)
        ratio = jnp.exp(policy.logprob - fields["old_logprobs"])
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
        d = frozen.logprob - policy.logprob
        term = (
            -fields["importance"] * surrogate
            + OBJECTIVE.kl_coef * (jnp.exp(d) - d - 1)
            - OBJECTIVE.entropy_coef * policy.entropy
        )
        return jnp.where(fields["weights"] > 0, fields["weights"] * term, 0.0).sum(), policy.logprob

    # One length, so that one compilation serves all: the tail is another segment without weight.
    names = ("token_ids", "target_ids", "old_logprobs", "importance", "weights")

    def padded(sequence):
        rest = 16 - len(sequence.token_ids)
        return {name: np.pad(getattr(sequence, name), (0, rest)) for name in names}

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    total, total_grad, scores = 0.0, jax.tree.map(np.zeros_like, host_params()), []
    for sequence in selection.sequences:
        (value, logprob), grad = step(host_params(), padded(sequence), sequence.advantages[-1])
        total += float(value)
        total_grad = jax.tree.map(np.add, total_grad, grad)
        scores.append(np.asarray(logprob)[0, : len(sequence.token_ids)])
    return total, total_grad, scores


def run_accumulate(selection, *, data, fsdp, microbatch_tokens, options=OPTIONS):
    mesh = make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])
    specs = param_specs(host_params(), fsdp)
    params = place_params(host_params(), mesh, specs, jnp.float32)
    frozen = place_params(reference_host_params(), mesh, specs, jnp.float32)
    accumulator = make_empty_accumulator(mesh, specs)(params)
    accumulate = make_accumulate(mesh, specs, TINY, OBJECTIVE, options)
    packing = Packing(microbatch_tokens, data * fsdp)
    batches = pack(selection.sequences, packing)
    compiled, logprobs = None, []
    for batch in batches:
        batch = jax.device_put(batch, NamedSharding(mesh, P(AXES)))
        if compiled is None:
            lowered = accumulate.lower(params, frozen, accumulator, batch)
            # Compile time is most of this test; the arithmetic does not change.
            compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        accumulator, logprob_BT = compiled(params, frozen, accumulator, batch)
        logprobs.append(np.asarray(logprob_BT))
    of_each = unpack(logprobs, selection.sequences, packing)
    return len(batches), jax.device_get(accumulator), of_each


def assert_same_logprobs(actual, expected, sequences):
    for a, e, sequence in zip(actual, expected, sequences, strict=True):
        np.testing.assert_allclose(a[sequence.active], e[sequence.active], **TOLERANCE)


def assert_same_gradient(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **TOLERANCE), actual, expected)


@pytest.mark.parametrize(
    "data, fsdp, microbatch_tokens, microbatches",
    [
        (1, 1, 192, 1),
        (1, 1, 16, 11),
        (2, 2, 32, 2),  # both axes
        (8, 1, 16, 2),  # copies alone, the last of them without tokens
        (1, 8, 16, 2),  # every matrix in eight; (1, 2) is below
    ],
)
def test_any_mesh_and_split_gives_the_literal_loss_and_gradient(
    selection, literal, data, fsdp, microbatch_tokens, microbatches
):
    count, accumulator, logprobs = run_accumulate(
        selection, data=data, fsdp=fsdp, microbatch_tokens=microbatch_tokens
    )
    assert count == microbatches
    loss, gradient, scores = literal
    np.testing.assert_allclose(accumulator.sums["loss"], loss, rtol=1e-5)
    assert accumulator.sums["active_tokens"] == selection.active_tokens
    assert_same_gradient(accumulator.grads, gradient)
    assert_same_logprobs(logprobs, scores, selection.sequences)


@pytest.mark.parametrize("schedule", ["logits", "fast", "lean"])
def test_score_says_what_the_update_would_see(selection, literal, schedule):
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    specs = param_specs(host_params(), 2)
    params = place_params(host_params(), mesh, specs, jnp.float32)
    options = OPTIONS._replace(head=HEAD._replace(schedule=schedule))
    score, packing = make_score(mesh, specs, TINY, options), Packing(64, 4)
    batches = pack(selection.sequences, packing)
    logprobs = [
        np.asarray(score(params, jax.device_put(batch, NamedSharding(mesh, P(AXES)))))
        for batch in batches
    ]
    of_each = unpack(logprobs, selection.sequences, packing)
    assert_same_logprobs(of_each, literal[2], selection.sequences)


def test_recomputing_layers_changes_nothing(selection, literal):
    head = HEAD._replace(schedule="logits", impl="reference")
    options = OPTIONS._replace(remat=Remat.LAYER, head=head)
    _, accumulator, _ = run_accumulate(
        selection, data=1, fsdp=2, microbatch_tokens=64, options=options
    )
    assert_same_gradient(accumulator.grads, literal[1])


def test_bfloat16_compute_stays_near_float32(selection, literal):
    options = OPTIONS._replace(compute_dtype=jnp.dtype("bfloat16"))
    _, accumulator, _ = run_accumulate(
        selection, data=1, fsdp=2, microbatch_tokens=64, options=options
    )
    for leaf in jax.tree.leaves(accumulator.grads):
        assert leaf.dtype == np.float32
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    actual, expected = flat(accumulator.grads), flat(literal[1])
    # Each of a few dozen roundings is off by 2**-9; their sum stays well under 5 percent.
    assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("devices", [1, 4])
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


def test_a_learner_on_a_cpu_lays_its_layers_out_for_it():
    made = builders.make_core()._functions
    params = made.abstract_state.params
    accumulator = jax.eval_shape(made.empty, params)
    lowered = made.accumulate.lower(params, None, accumulator, made.batch_shapes(2, 64))
    # Every gradient of weights is one product of matrices.
    assert "contracting_dims = [0, 1] x [0, 1]" not in lowered.as_text()
