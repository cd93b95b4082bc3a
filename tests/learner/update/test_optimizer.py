"""Learning-rate schedules, update rules and the types of their moments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from learner.config import OptimizerConfig
from learner.update.mesh import make_mesh
from learner.update.moments import round_at_random
from learner.update.optimizer import learning_rate_schedule, make_optimizer
from learner.update.sharding import param_specs
from learner.update.state import init_state, state_shardings

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


def wide_tree(seed):
    """Stacked matrices that are large enough to be factored, and what is not."""
    keys = jax.random.split(jax.random.key(seed), 3)
    matrix, norm, small = (
        jax.random.normal(key, shape) * scale
        for key, shape, scale in zip(
            keys, ((2, 130, 140), (2, 140), (4, 140)), (1.0, 0.1, 3.0), strict=True
        )
    )
    return {"layers": {"proj": matrix, "norm": norm}, "embed_tokens": small}


def literal_adafactor(grads, steps):
    """The paper's algorithm without a first moment, on one matrix or vector, in float64."""
    row = column = whole = 0.0
    for step, grad in enumerate(np.asarray(grads, np.float64), 1):
        decay = 1 - step**-0.8
        square = grad**2 + 1e-30
        if min(grad.shape) >= 128 and grad.ndim == 2:
            row = decay * row + (1 - decay) * square.mean(1)
            column = decay * column + (1 - decay) * square.mean(0)
            moment = np.outer(row, column) / row.mean()
        else:
            moment = whole = decay * whole + (1 - decay) * square
        update = grad / np.sqrt(moment)
        update /= max(1.0, np.sqrt((update**2).mean()))
    return update


def test_adafactor_is_the_papers_on_each_layers_matrix():
    config = OptimizerConfig(name="adafactor", learning_rate=1.0, clip_norm=1e6)
    optimizer = make_optimizer(config, optax.constant_schedule(1.0))
    params = wide_tree(0)
    state, steps = optimizer.init(params), 4
    grads = [wide_tree(seed) for seed in range(1, steps + 1)]
    # Clipped in one layer alone: its last gradient is far above its moment.
    last = grads[-1]["layers"]
    grads[-1]["layers"] = jax.tree.map(lambda leaf: leaf.at[1].multiply(10), last)
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
    for layer in range(2):
        for name in ("proj", "norm"):
            expected = literal_adafactor([g["layers"][name][layer] for g in grads], steps)
            np.testing.assert_allclose(-updates["layers"][name][layer], expected, rtol=2e-4)
    expected = literal_adafactor([g["embed_tokens"] for g in grads], steps)
    np.testing.assert_allclose(-updates["embed_tokens"], expected, rtol=2e-4)
    kept = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert kept < 2 * (130 + 140) + 2 * 140 + 4 * 140 + 32, "no moment of a matrix is whole"


def test_rounding_at_random_is_right_in_the_mean_and_takes_a_neighbour():
    value = jnp.full(40_000, 1.0 + 2**-7 / 4)  # a quarter of the way from 1 to its neighbour
    rounded = round_at_random(value, jax.random.key(3)).astype(jnp.float32)
    up = rounded == 1.0 + 2**-7
    assert bool(jnp.all(up | (rounded == 1.0)))
    assert abs(float(up.mean()) - 0.25) < 5 * (0.25 * 0.75 / 40_000) ** 0.5
    np.testing.assert_array_equal(-rounded, round_at_random(-value, jax.random.key(3)))


def test_what_bfloat16_can_hold_and_what_is_not_finite_stays():
    held = jnp.array([0.0, -0.0, 1.0, -3.5, 2.0**-130, 3.3895314e38, jnp.inf, -jnp.inf, jnp.nan])
    for seed in range(20):
        found = round_at_random(held, jax.random.key(seed)).astype(jnp.float32)
        np.testing.assert_array_equal(found, held)
        assert bool(jnp.signbit(found[1]))


def test_a_second_moment_in_bfloat16_fades_as_it_should():
    """Rounded to the nearest it would stay: a thousandth is less than half of a step."""
    config = OptimizerConfig(name="adamw", moments_dtype="bfloat16", clip_norm=1e6)
    optimizer = make_optimizer(config, optax.constant_schedule(0.0))
    params = {"w": jnp.zeros((64, 64))}
    _, state = optimizer.update({"w": jnp.ones((64, 64))}, optimizer.init(params), params)

    def fade(state, _):
        return optimizer.update({"w": jnp.zeros((64, 64))}, state, params)[1], None

    state, _ = jax.lax.scan(fade, state, length=2000)
    [second] = [leaf for leaf in jax.tree.leaves(state[1].inner.nu)]
    assert second.dtype == jnp.bfloat16
    expected = 1e-3 * 0.999**2000
    assert abs(float(second.astype(jnp.float32).mean()) / expected - 1) < 0.02
    assert float((jnp.ones((), jnp.bfloat16) * 0.999).astype(jnp.bfloat16)) == 1.0


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_moments_in_bfloat16_step_nearly_as_those_in_float32_and_always_alike(name):
    def run(moments_dtype):
        config = OptimizerConfig(
            name=name, learning_rate=0.01, clip_norm=1e6, moments_dtype=moments_dtype
        )
        optimizer = make_optimizer(config, optax.constant_schedule(0.01))
        params = layer_tree(0)
        state = optimizer.init(params)
        step = jax.jit(optimizer.update)
        for seed in range(30):
            updates, state = step(layer_tree(100 + seed % 3), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    exact, whole = run("float32")
    near, half = run("bfloat16")
    for one, other, start in zip(*map(jax.tree.leaves, (exact, near, layer_tree(0))), strict=True):
        assert float(jnp.linalg.norm(one - other)) < 0.05 * float(jnp.linalg.norm(one - start))
    jax.tree.map(np.testing.assert_array_equal, near, run("bfloat16")[0])
    shapes = {leaf.shape for leaf in jax.tree.leaves(exact)}
    moments = lambda state: sum(
        leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.shape in shapes
    )
    assert moments(half) * 2 == moments(whole)


@pytest.mark.parametrize(
    "changes", [{"name": "adafactor"}, {"moments_dtype": "bfloat16"}, {"name": "muon"}]
)
def test_a_step_on_devices_that_share_the_state_is_that_of_one_device(changes):
    config = OptimizerConfig(learning_rate=0.1, clip_norm=1e6, **changes)
    optimizer = make_optimizer(config, optax.constant_schedule(0.1))
    params = jax.tree.map(lambda leaf: leaf[..., :128] if leaf.ndim > 1 else leaf, wide_tree(0))
    grads = [jax.tree.map(lambda leaf, by=by: leaf + by, params) for by in range(3)]
    found = []
    for devices in (1, 4):
        mesh = make_mesh(data=1, fsdp=devices, devices=jax.devices()[:devices])
        specs = param_specs(params, devices)
        state = init_state(params, optimizer, mesh, specs)
        shardings = state_shardings(state.params, optimizer, mesh, specs)

        def step(state, grads, shardings=shardings):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return jax.lax.with_sharding_constraint(
                dataclasses.replace(state, params=params, opt_state=opt_state), shardings
            )

        for grad in grads:
            state = jax.jit(step, donate_argnums=0)(state, grad)
        found.append(jax.device_get((state.params, state.opt_state)))
    jax.tree.map(lambda one, other: close(one, other), *found)


def close(one, other):
    np.testing.assert_allclose(
        np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=2e-2, atol=1e-5
    )


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_only_moments_are_rounded_and_the_first_step_has_none(name):
    params, grads = layer_tree(0), layer_tree(1)
    steps, states = [], []
    for moments_dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(name=name, clip_norm=1e6, moments_dtype=moments_dtype)
        optimizer = make_optimizer(config, optax.constant_schedule(0.1))
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        steps.append(updates)
        states.append(jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, *steps)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    narrow = [leaf.shape for leaf in states[1] if leaf.dtype == jnp.bfloat16]
    wide = [leaf.shape for leaf in states[1] if leaf.dtype == jnp.float32]
    assert set(narrow) <= set(shapes) and not set(wide) & set(shapes), "such as muon's constants"


@pytest.mark.parametrize("name", ["adafactor", "sgd"])
def test_a_rule_without_whole_moments_does_not_read_their_dtype(name):
    states = []
    for moments_dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(name=name, moments_dtype=moments_dtype)
        states.append(make_optimizer(config, optax.constant_schedule(0.1)).init(layer_tree(0)))
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(states[1]))
