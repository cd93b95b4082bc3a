"""Gradients of stacked layers that are added in place: jax's own, whatever is kept of a layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compiled_program import program_sizes
from kernels.packed_attention.ops import AttentionPlan
from models.adapter import abstract_adapter, adapter_shape, join
from models.config import ModelConfig
from models.layer_scan import Backward, LayerLayout, Remat, kept_bytes, layout_for
from models.rope import rotary
from models.transformer import Block, abstract_params, forward, init_params, packed_attend

CONFIG = ModelConfig(
    model_type="qwen2",
    vocab_size=16,
    hidden_size=32,
    intermediate_size=96,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    tie_word_embeddings=True,
)
TOKENS = 48
LOOPED, FLAT, UNROLLED = (
    LayerLayout(),
    LayerLayout(flat=True),
    LayerLayout(unrolled=CONFIG.num_layers),
)
LAYERS_BYTES = 12 * 4 * (32 * (32 + 32 + 32) + 3 * 32 * 96)


@functools.cache
def given():
    """Parameters, tokens of two segments with padding, and sums that are not zero."""
    params = init_params(jax.random.key(0), CONFIG)
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(0, 16, (1, TOKENS)), jnp.int32)
    segments = jnp.asarray([[1] * 20 + [2] * 24 + [0] * 4], jnp.int32)
    so_far = jax.tree.map(lambda leaf: np.float32(rng.normal(0, 1, leaf.shape)), params["layers"])
    return params, ids, segments, so_far


def loss(params, backward=None, *, impl="xla", dtype=jnp.float32, rows=1):
    _, ids, segments, _ = given()
    position, weight = jnp.arange(TOKENS), jnp.cos(jnp.arange(TOKENS))
    ids, segments, position, weight = (
        array.reshape(rows, -1) for array in (ids, segments, position, weight)
    )
    attend = packed_attend(segments, operand_dtype=dtype, plan=AttentionPlan(impl))
    hidden, _ = forward(
        params, CONFIG, ids, position, attend, compute_dtype=dtype, backward=backward
    )
    return (hidden.astype(jnp.float32) * weight[..., None]).sum()


@functools.cache
def program(remat, **how):
    """`traced`, compiled."""
    return traced(remat, **how).lower().compile()


def traced(remat, layout=LOOPED, **how):
    """(params, sums so far) -> gradients of what is not in the layers, and the sums."""

    def summed(others, so_far, layers):
        backward = Backward(remat, so_far, lambda g: g, layout)
        return loss({**others, "layers": layers}, backward, **how)

    def gradients(params, so_far):
        others = {name: tree for name, tree in params.items() if name != "layers"}
        return jax.grad(summed, argnums=(0, 1))(others, so_far, params["layers"])

    params, _, _, so_far = given()
    return jax.jit(gradients, donate_argnums=1).trace(params, so_far)


def assert_gradients_of_jax(program, rtol, **how):
    params, _, _, so_far = given()
    others, layers = program(params, jax.tree.map(jnp.array, so_far))
    expected = jax.jit(jax.grad(functools.partial(loss, **how)))(params)
    expected_layers = jax.tree.map(np.add, so_far, expected.pop("layers"))
    for actual, wanted in ((others, expected), (layers, expected_layers)):
        for a, w in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
            # Relative to the array's own size: single numbers may be sums that nearly cancel.
            assert np.abs(a - w).max() <= rtol * np.abs(w).max()


@pytest.mark.parametrize("remat", Remat)
def test_every_policy_gives_the_gradient_of_jax(remat):
    assert_gradients_of_jax(program(remat), 2e-6)


@pytest.mark.parametrize("remat", [Remat.LAYER, Remat.ATTENTION])
@pytest.mark.parametrize("impl", ["reference", "pallas_interpret"])
def test_with_every_attention(remat, impl):
    assert_gradients_of_jax(program(remat, impl=impl), 2e-6, impl=impl)


@pytest.mark.parametrize(
    "remat, layout",
    [(remat, FLAT) for remat in Remat]
    + [(Remat.NONE, UNROLLED), (Remat.NONE, FLAT._replace(unrolled=CONFIG.num_layers))],
)
def test_every_layout_gives_the_gradient_of_jax(remat, layout):
    compiled = program(remat, layout=layout, impl="reference", rows=2)
    assert_gradients_of_jax(compiled, 2e-6, impl="reference", rows=2)


def test_rows_of_flat_tokens_attend_to_themselves_block_by_block():
    compiled = program(Remat.ATTENTION, layout=FLAT, rows=2)
    assert_gradients_of_jax(compiled, 2e-6, rows=2)


def test_flat_tokens_make_every_product_with_weights_one_of_matrices():
    over_both = "contracting_dims = [0, 1] x [0, 1]"
    text = {
        layout: traced(Remat.NONE, layout, impl="reference").lower().as_text()
        for layout in (LOOPED, FLAT)
    }
    assert over_both in text[LOOPED]
    assert over_both not in text[FLAT]


@pytest.mark.parametrize(
    "remat, at_most, loops",
    [
        (Remat.NONE, CONFIG.num_layers, False),
        (Remat.NONE, CONFIG.num_layers - 1, True),
        (Remat.LAYER, CONFIG.num_layers, True),
    ],
)
def test_layers_are_a_loop_where_they_are_many_or_made_again(remat, at_most, loops):
    lowered = traced(remat, LayerLayout(unrolled=at_most), impl="reference").lower()
    assert ("stablehlo.while" in lowered.as_text()) == loops


def test_layers_without_a_loop_take_no_more_memory():
    looped, unrolled = (
        program(Remat.NONE, layout=layout, impl="reference") for layout in (LOOPED, UNROLLED)
    )
    assert temp_bytes(unrolled) <= temp_bytes(looped)


def test_only_a_cpu_has_a_layout_of_its_own():
    assert layout_for("tpu") == layout_for("gpu") == LOOPED
    assert layout_for("cpu").flat
    assert layout_for("cpu").unrolled > 0


def test_in_bfloat16_the_sums_are_float32():
    """Each layer rounds as before; what is rounded elsewhere is a few units in the last place."""
    compiled = program(Remat.LAYER, dtype=jnp.bfloat16)
    assert_gradients_of_jax(compiled, 2e-2, dtype=jnp.bfloat16)
    params, _, _, so_far = given()
    zeros = jax.tree.map(jnp.zeros_like, so_far)
    _, alone = compiled(params, zeros)
    # Sums far above the gradient, which bfloat16 would swallow.
    large = jax.tree.map(lambda grad: 1024 * np.abs(grad).max() + 0 * grad, alone)
    _, added = compiled(params, jax.tree.map(jnp.array, large))
    for before, grad, after in zip(*map(jax.tree.leaves, (large, alone, added)), strict=True):
        assert after.dtype == jnp.float32
        np.testing.assert_allclose(after - before, grad, rtol=0, atol=1e-4 * np.abs(grad).max())


def temp_bytes(compiled):
    return program_sizes(compiled)["temp_bytes"]


def test_no_gradient_stands_beside_the_sums():
    params, _, _, so_far = given()
    by_jax = lambda params, so_far: jax.tree.map(jnp.add, so_far, jax.grad(loss)(params)["layers"])
    compiled = jax.jit(by_jax, donate_argnums=1).lower(params, so_far).compile()
    assert temp_bytes(compiled) > LAYERS_BYTES
    # Activations, and the gradient of one layer.
    assert temp_bytes(program(Remat.LAYER)) < 0.8 * LAYERS_BYTES


def test_the_less_is_kept_the_less_memory_it_takes():
    kept = {remat: temp_bytes(program(remat)) for remat in Remat if remat is not Remat.OFFLOAD}
    assert kept[Remat.LAYER] < kept[Remat.ATTENTION] < kept[Remat.DOTS] < kept[Remat.NONE]
    # Two products of the MLP in each layer, float32; those of one layer are there in any case.
    mlp_bytes = CONFIG.num_layers * TOKENS * 2 * CONFIG.intermediate_size * 4
    assert 0.75 * mlp_bytes < kept[Remat.MLP] - kept[Remat.LAYER] < mlp_bytes


def test_what_is_offloaded_goes_to_the_memory_of_the_host():
    # A CPU has one memory, and its lowering says nothing of others.
    text = {remat: traced(remat).lower(lowering_platforms=("tpu",)).as_text() for remat in Remat}
    named = {remat for remat in Remat if "pinned_host" in text[remat]}
    assert named == {Remat.OFFLOAD}


def test_results_of_products_are_kept_beside_an_adapter_too():
    base = abstract_params(CONFIG)
    adapter = abstract_adapter(adapter_shape(("*_proj",), rank=2, alpha=2, config=CONFIG), CONFIG)
    layers, trained = join(base, adapter)["layers"], adapter["layers"]
    kept = {}

    def run(x_BTD, row_BT):
        attend = packed_attend(row_BT, operand_dtype=jnp.float32, plan=AttentionPlan("xla"))
        cos_sin = rotary(row_BT, CONFIG)
        block = Block(CONFIG)
        layer = lambda x, weights: block.apply({"params": weights}, x, cos_sin, attend, None)[0]
        for remat in (Remat.LAYER, Remat.DOTS):
            backward = Backward(remat, trained, lambda grads: grads)
            kept[remat] = kept_bytes(layer, x_BTD, layers, lambda weights: weights, backward)
        return x_BTD

    shape = jax.ShapeDtypeStruct
    jax.eval_shape(run, shape((1, TOKENS, 32), jnp.float32), shape((1, TOKENS), jnp.int32))
    # q, k, v, o, gate and up; down_proj's result is only added to the stream.
    assert kept[Remat.DOTS] - kept[Remat.LAYER] == 4 * TOKENS * (32 + 16 + 16 + 32 + 2 * 96)
