"""Learning-rate schedules and float32 master weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from learner.config import OptimizerConfig
from learner.update.optimizer import learning_rate_schedule, make_optimizer

pytestmark = pytest.mark.slow


def test_warmup_then_cosine_C07(cases):
    given, expected = cases("checkpoint")["C07"]["input"], cases("checkpoint")["C07"]["expected"]
    config = OptimizerConfig(
        learning_rate=given["peak"], schedule="cosine", warmup_steps=given["warmup"]
    )
    schedule = learning_rate_schedule(config, given["total"])
    for count, rate in expected["lr_by_update_count"].items():
        np.testing.assert_allclose(schedule(int(count)), rate, rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize(
    "options, rates",
    [
        (dict(schedule="constant"), {0: 1.0, 7: 1.0, 99: 1.0}),
        (dict(schedule="constant", warmup_steps=4), {0: 0.0, 1: 0.25, 4: 1.0, 9: 1.0}),
        (dict(schedule="linear", final_fraction=0.2), {0: 1.0, 5: 0.6, 10: 0.2, 50: 0.2}),
        (dict(schedule="linear", warmup_steps=2), {1: 0.5, 2: 1.0, 6: 0.5, 10: 0.0}),
        (dict(schedule="cosine", final_fraction=0.2), {0: 1.0, 5: 0.6, 10: 0.2}),
    ],
)
def test_schedules_by_hand(options, rates):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **options), 10)
    for count, rate in rates.items():
        np.testing.assert_allclose(schedule(count), rate, rtol=1e-6, atol=1e-7)


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps=10 must be below the 10 updates"):
        learning_rate_schedule(OptimizerConfig(warmup_steps=10), 10)


def step_once(config, params, grads):
    optimizer = make_optimizer(config, optax.constant_schedule(config.learning_rate))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def test_small_updates_reach_the_master_weights_L12(cases):
    case = cases("loss")["L12"]
    given, expected = case["input"], case["expected"]
    config = OptimizerConfig(name="adamw", learning_rate=given["lr"], clip_norm=10.0)
    optimizer = make_optimizer(config, learning_rate_schedule(config, given["steps"] + 1))
    params = {"w": jnp.array([[expected["start_bf16"]]], jnp.float32)}
    grads = {"w": jnp.full((1, 1), given["gradient"])}

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=given["steps"])
    assert params["w"].dtype == jnp.float32
    np.testing.assert_allclose(params["w"][0, 0], expected["fp32_master_after"], rtol=1e-5)
    np.testing.assert_allclose(
        params["w"].astype(jnp.bfloat16).astype(jnp.float32)[0, 0],
        expected["bf16_copy_of_master_after"],
        rtol=1e-5,
    )


def test_gradient_is_clipped_by_its_global_norm():
    # norm 5 against a bound of 1: a plain step of 0.1 moves by 0.1 * (3, 4) / 5
    params = {"a": jnp.zeros((1, 1)), "layers": {"b": jnp.zeros((2, 1))}}
    grads = {"a": jnp.array([[3.0]]), "layers": {"b": jnp.array([[4.0], [0.0]])}}
    after = step_once(OptimizerConfig(name="sgd", learning_rate=0.1, clip_norm=1.0), params, grads)
    np.testing.assert_allclose(after["a"], [[-0.06]], rtol=1e-6)
    np.testing.assert_allclose(after["layers"]["b"], [[-0.08], [0.0]], rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_decay_shrinks_matrices_and_spares_vectors(name):
    params = {"w": jnp.full((2, 2), 2.0), "layers": {"norm": jnp.full((3, 4), 2.0)}}
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5)
    after = step_once(config, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(after["w"], np.full((2, 2), 1.9), rtol=1e-6)
    np.testing.assert_array_equal(after["layers"]["norm"], params["layers"]["norm"])


def test_lion_steps_by_the_sign():
    params = {"w": jnp.zeros((1, 2))}
    config = OptimizerConfig(name="lion", learning_rate=0.1)
    after = step_once(config, params, {"w": jnp.array([[0.3, -0.001]])})
    np.testing.assert_allclose(after["w"], [[-0.1, 0.1]], rtol=1e-6)


def layer_tree(seed):
    """A model's tree in miniature: a stacked matrix, a stacked bias, an embedding."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((2, 4, 6), (2, 4), (5, 6))
    matrix, bias, embedding = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    return {
        "layers": {"proj": {"weight": matrix, "bias": bias}},
        "embed_tokens": {"weight": embedding},
    }


def test_muon_makes_the_step_of_a_matrix_orthogonal_and_leaves_the_rest_to_adam():
    config = OptimizerConfig(name="muon", learning_rate=1.0, clip_norm=1e6)
    params, grads = layer_tree(0), layer_tree(1)
    after = step_once(config, params, grads)
    moved = jax.tree.map(jnp.subtract, params, after)
    for matrix in moved["layers"]["proj"]["weight"]:
        values = np.linalg.svd(matrix, compute_uv=False)
        # Five Newton-Schulz steps leave the singular values between 0.7 and 1.2.
        assert values.min() > 0.5 and values.max() < 1.3
    # The first step of Adam is the sign, whatever the gradient's size; with Nesterov momentum too.
    for name, tree in (
        ("embed_tokens", moved["embed_tokens"]["weight"]),
        ("bias", moved["layers"]["proj"]["bias"]),
    ):
        grad = (
            grads["embed_tokens"]["weight"]
            if name == "embed_tokens"
            else (grads["layers"]["proj"]["bias"])
        )
        assert np.all(np.sign(tree) == np.sign(grad)), name
        assert np.abs(tree).max() < 0.2, "a tenth of the rate"


def test_weight_decay_of_muon_shrinks_matrices_only():
    config = OptimizerConfig(name="muon", learning_rate=0.5, weight_decay=0.1)
    params = layer_tree(0)
    after = step_once(config, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(
        after["layers"]["proj"]["weight"], 0.95 * params["layers"]["proj"]["weight"], rtol=1e-6
    )
    np.testing.assert_array_equal(after["layers"]["proj"]["bias"], params["layers"]["proj"]["bias"])
