"""Model operations against the products that JAX is asked for, and peaks of chips."""

import types
from math import prod

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from models.config import ModelConfig
from models.flops import flops_metrics, forward_flops, peak_flops, training_flops
from models.transformer import forward, head_weight, init_params, logits, packed_attend

CONFIG = ModelConfig(
    model_type="qwen2",
    vocab_size=96,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
)


def products(jaxpr, times=1):
    """Operations of all products of matrices, loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            out = equation.outvars[0].aval.shape
            total += 2 * prod(out) * prod(left[axis] for axis in contracted)
        runs = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            total += runs * products(inner)
    return total


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_a_forward_pass_has_the_products_that_are_asked_for(tokens):
    params = init_params(jax.random.key(0), CONFIG)

    def run(params):
        ids = jnp.zeros((1, tokens), jnp.int32)
        attend = packed_attend(jnp.ones((1, tokens), jnp.int32), operand_dtype=jnp.float32)
        position = jnp.arange(tokens)[None]
        hidden, _ = forward(params, CONFIG, ids, position, attend, compute_dtype=jnp.float32)
        return logits(hidden, head_weight(params))

    asked = products(jax.make_jaxpr(run)(params).jaxpr)
    # Attention is asked for all pairs, and counted for those that may see each other.
    unseen = tokens**2 - tokens * (tokens + 1) // 2
    assert asked == forward_flops(CONFIG, [tokens]) + 4 * 3 * 48 * unseen


def test_sequences_add_up_and_see_no_other():
    apart = forward_flops(CONFIG, [5]) + forward_flops(CONFIG, [3])
    assert forward_flops(CONFIG, [5, 3]) == apart < forward_flops(CONFIG, [8])
    assert training_flops(CONFIG, [5, 3]) == 3 * apart


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5", 459e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5p", 459e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("cpu", None),
    ],
)
def test_the_share_of_the_peak_is_said_where_the_peak_is_known(kind, peak):
    devices = [types.SimpleNamespace(device_kind=kind)] * 4
    assert peak_flops(devices[0], "bfloat16") == peak
    assert peak_flops(devices[0], "float32") is None
    found = flops_metrics(400e12, 2.0, devices, "bfloat16")
    expected = {"throughput/train/model_tflops_per_chip_update": 50.0}
    if peak:
        expected["throughput/train/mfu_update"] = pytest.approx(50e12 / peak)
    assert found == expected


def test_a_frozen_model_needs_no_gradient_of_its_matrices():
    """Forward, and the gradient in what went in: attention as ever, each matrix twice."""
    one = [1]  # a token that sees itself alone: its attention is two products of the query's width
    attention = 4 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim
    matrices = forward_flops(CONFIG, one) - attention
    assert training_flops(CONFIG, one, frozen=True) == 3 * attention + 2 * matrices
