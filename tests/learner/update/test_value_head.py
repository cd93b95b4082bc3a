"""The critic's head: its loss by hand, its gradient in float64, and where it is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.durable.checkpoint import CheckpointFolder
from learner.update import value_head
from models.files.checkpoint import expected_shapes
from models.transformer import forward, head_weight, logits, packed_attend
from services.process.phase_clock import PhaseClock
from tests.learner.builders import TINY, host_params, make_core, random_groups

PPO = {"advantage": "gae", "kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
SGD = {"name": "sgd", "learning_rate": 0.05, "clip_norm": 1e9}


def test_the_loss_and_its_slope_worked_out_by_hand():
    #        inside, held on its way, going the wrong way, past its target, not in the loss
    value = jnp.array([[0.1, 0.5, 0.5, -0.5, jnp.nan]])
    old = jnp.array([[0.0, 0.0, 0.0, 0.0, jnp.nan]])
    target = jnp.array([[1.0, 1.0, 0.0, -0.3, jnp.nan]])
    active = jnp.array([[True, True, True, True, False]])

    def loss(value, clip=0.2):
        return value_head.value_terms(value, old, target, active, clip)

    each, held = loss(value)
    # 0.9^2 / 2; (1 - 0.2)^2 / 2; 0.5^2 / 2, more than 0.2^2 / 2; 0.2^2 / 2, more than 0.1^2 / 2
    np.testing.assert_allclose(each, [[0.405, 0.32, 0.125, 0.02, 0.0]], rtol=1e-6)
    assert held.tolist() == [[False, True, False, False, False]]
    slope = jax.grad(lambda value: loss(value)[0].sum())(value)
    np.testing.assert_allclose(slope, [[-0.9, 0.0, 0.5, -0.2, 0.0]], rtol=1e-6)
    each, held = loss(value, clip=None)
    np.testing.assert_allclose(each, [[0.405, 0.125, 0.125, 0.02, 0.0]], rtol=1e-6)
    assert not held.any()


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_gradients_are_those_of_the_formula_in_float64(clip):
    rng = np.random.default_rng(0)
    B, T, D = 2, 5, 4
    hidden, weight = rng.normal(size=(B, T, D)), rng.normal(size=D)
    bias, target = rng.normal(size=1), rng.normal(size=(B, T))
    tokens = rng.uniform(0.5, 2.0, (B, T)) * (rng.random((B, T)) < 0.7)
    value = hidden @ weight + bias
    old = value + rng.normal(0, 0.4, (B, T))
    moved = value if clip is None else old + np.clip(value - old, -clip, clip)
    is_held = (moved - target) ** 2 > (value - target) ** 2
    slope = tokens * np.where(is_held, 0.0, value - target)
    loss = (tokens * 0.5 * np.maximum((value - target) ** 2, (moved - target) ** 2)).sum()
    assert clip is None or 0 < (is_held & (tokens > 0)).sum() < (tokens > 0).sum()

    head = {"weight": np.float32(weight), "bias": np.float32(bias)}
    sums, d_head, d_hidden = value_head.value_gradients(
        head, *map(jnp.float32, (hidden, old, target, tokens)), clip
    )
    # Float32 against float64, sums of ten terms around 1.
    close = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums["value_loss"], loss, **close)
    assert sums["value_clipped"] == (is_held & (tokens > 0)).sum()
    np.testing.assert_allclose(d_hidden, slope[..., None] * weight, **close)
    np.testing.assert_allclose(d_head["weight"], (slope[..., None] * hidden).sum((0, 1)), **close)
    np.testing.assert_allclose(d_head["bias"], [slope.sum()], **close)


def test_values_are_float32_whatever_the_hidden_states_are():
    head = {"weight": np.float32([1.0, 2.0**-10]), "bias": np.float32([0.0])}
    hidden = jnp.array([[[256.0, 1.0]]], jnp.bfloat16)
    found = value_head.token_values(head, hidden)
    assert found.dtype == jnp.float32 and float(found[0, 0]) == 256 + 2**-10


@pytest.mark.slow
def test_an_update_is_that_of_policy_and_critic_written_out():
    """The second update, whose values are not 0: against one sequence at a time, whole logits."""
    core = make_core(algorithm=PPO | {"kl_coef": 0.0, "kl_in": "loss"}, optimizer=SGD)
    core.update(random_groups(3, seed=1), PhaseClock())
    seen = []
    train = core._train
    core._train = lambda groups, selection, *rest: (
        seen.append(selection),
        train(groups, selection, *rest),
    )[1]
    before = jax.device_get(core.state.params)
    metrics = core.update(random_groups(3, seed=2), PhaseClock())
    [selection] = seen
    assert metrics["train/value_mean"] != 0

    def loss(params, sequence):
        active = sequence.active
        ids = sequence.token_ids[None]
        hidden, _ = forward(
            params,
            TINY,
            ids,
            jnp.arange(ids.shape[1])[None],
            packed_attend(jnp.ones_like(ids), operand_dtype=jnp.float32),
            compute_dtype=jnp.float32,
        )
        scores = logits(hidden[0], head_weight(params))[:, : TINY.vocab_size - 2] / 0.8
        logprob = jax.nn.log_softmax(scores)[jnp.arange(ids.shape[1]), sequence.target_ids]
        ratio = jnp.exp(logprob - sequence.old_logprobs)[active]
        advantage = sequence.advantages[active]
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        head = params["value_head"]
        value = (hidden[0] @ head["weight"] + head["bias"])[active]
        old, target = sequence.values[active], sequence.returns[active]
        held = jnp.clip(value, old - 0.2, old + 0.2)
        critic = 0.5 * jnp.maximum((value - target) ** 2, (held - target) ** 2)
        return (policy + 0.1 * critic).sum() / selection.denominator

    # At the old values both branches of the maximum are equal, and so are their slopes.
    total = jax.tree.map(np.zeros_like, before)
    for sequence in selection.sequences:
        total = jax.tree.map(np.add, total, jax.grad(loss)(before, sequence))
    after = jax.tree_util.tree_leaves_with_path(core.state.params)
    each = zip(after, jax.tree.leaves(before), jax.tree.leaves(total), strict=True)
    for (path, leaf), start, slope in each:
        rate = 0.05 * 10 if path[0].key == value_head.NAME else 0.05
        expected = start - rate * slope
        np.testing.assert_allclose(leaf, expected, rtol=2e-5, atol=2e-6, err_msg=str(path))


@pytest.mark.slow
def test_what_is_published_and_exported_has_no_value_head():
    core = make_core(algorithm=PPO, optimizer=SGD, fsdp=2)
    core.update(random_groups(), PhaseClock())
    names = set(expected_shapes(TINY))
    assert set(core.named_weights("float32")) == names
    snapshot = core.snapshot("bfloat16", PhaseClock())
    assert set(snapshot.tensors) == names
    assert snapshot.probe is not None and np.isfinite(snapshot.probe.record().logprobs).all()


@pytest.mark.slow
def test_the_head_does_not_decay_and_moves_at_its_own_rate():
    """Lion moves each weight by the learning rate, here of the head; decay is for matrices."""
    lion = {"name": "lion", "learning_rate": 0.01, "weight_decay": 1000.0, "clip_norm": 1e9}
    core = make_core(algorithm=PPO | {"value_rate_factor": 4.0}, optimizer=lion)
    core.update(random_groups(), PhaseClock())
    head = jax.device_get(core.state.params["value_head"])
    np.testing.assert_allclose(np.abs(head["weight"]), 0.04, rtol=1e-5)
    np.testing.assert_allclose(np.abs(head["bias"]), 0.04, rtol=1e-5)


@pytest.mark.slow
def test_a_resume_goes_on_with_the_very_critic_and_entropy_coefficient(tmp_path):
    steered = {"entropy_target": 2.9, "entropy_coef": 0.001}
    ppo, adam = PPO | steered, {"learning_rate": 0.01}
    make = functools.partial(make_core, algorithm=ppo, optimizer=adam, data=2, fsdp=2)
    core = make()
    for seed in range(2):
        core.update(random_groups(seed=seed), PhaseClock())
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(2, core.state, {"policy_version": 2})
    expected = [core.update(random_groups(seed=seed), PhaseClock()) for seed in (2, 3)]
    other = make()
    found = folder.restore(other.abstract_state)
    assert found is not None
    other.resume(found.state, policy_version=2)
    for seed, before in zip((2, 3), expected, strict=True):
        now = other.update(random_groups(seed=seed), PhaseClock())
        for name in ("train/loss", "train/value_loss", "train/value_mean", "train/entropy_coef"):
            assert now[name] == before[name], name
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(other.state.params),
        jax.device_get(core.state.params),
    )


@pytest.mark.slow
def test_a_checkpoint_of_another_objective_is_refused_and_the_keys_named(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, make_core().state, {})
    for algorithm in (PPO, {"entropy_target": 0.2}):
        with pytest.raises(ValueError, match="algorithm.advantage and algorithm.entropy_target"):
            folder.restore(make_core(algorithm=algorithm).abstract_state)


def test_the_head_counts_and_is_taken_off():
    params = value_head.with_value_head(host_params(), TINY.hidden_size)
    head = params[value_head.NAME]
    assert sum(leaf.size for leaf in head.values()) == value_head.head_parameters(16) == 17
    assert not any(leaf.any() for leaf in head.values())
    assert value_head.policy_params(params).keys() == host_params().keys()
    assert value_head.policy_params(host_params()) == host_params()
