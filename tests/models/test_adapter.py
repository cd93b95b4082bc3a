"""Adapters of projections: which they are, what they compute, and the way to full weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.adapter import (
    AdapterShape,
    adapter_leaves,
    adapter_parameters,
    adapter_shape,
    adapter_shapes,
    from_named_adapter,
    init_adapter,
    join,
    merge,
    projections,
    to_named_adapter,
)
from models.config import ModelConfig
from models.files.checkpoint import from_named
from models.files.hf_config import from_hf
from models.transformer import Linear, forward, head_weight, logits, packed_attend, wide_product
from tests.models.tiny_models import HF_CONFIGS, random_named

CONFIG = from_hf(HF_CONFIGS["qwen3"])
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_shape(targets=LINEAR, rank=4, alpha=6.0, config=CONFIG) -> AdapterShape:
    return adapter_shape(targets, rank=rank, alpha=alpha, config=config)


def random_adapter(shape, config=CONFIG, seed=1):
    """Neither matrix is 0."""
    rng = np.random.default_rng(seed)
    fresh = init_adapter(shape, config, seed)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(0, 0.3, leaf.shape)), fresh)


@functools.partial(jax.jit, static_argnums=1)
def logits_of(params, config=CONFIG):
    ids_BT = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 12)))
    position_BT = jnp.broadcast_to(jnp.arange(12), (2, 12))
    attend = packed_attend(jnp.ones_like(ids_BT), operand_dtype=jnp.float32)
    hidden, _ = forward(params, config, ids_BT, position_BT, attend, compute_dtype=jnp.float32)
    return logits(hidden, head_weight(params))


def scaled(adapter, shape):
    """As the model takes it: B holds the scale."""
    factor = lambda path: shape.scale if path[-1].key == "lora_B" else 1.0
    return jax.tree.map_with_path(lambda path, leaf: factor(path) * leaf, adapter)


def test_a_projection_with_an_adapter_worked_out_by_hand():
    #       W = [[1, 2]], A = [[3, 4]], B = [[5]] and x = [1, -1]: 1 - 2 + 5 (3 - 4) = -6
    params = {
        "weight": jnp.array([[1.0, 2.0]]),
        "lora_A": jnp.array([[3.0, 4.0]]),
        "lora_B": jnp.array([[5.0]]),
    }
    x = jnp.array([[1.0, -1.0]])
    assert Linear(1, bias=False).apply({"params": params}, x) == -6.0
    biased = {**params, "bias": jnp.array([10.0])}
    assert Linear(1, bias=True).apply({"params": biased}, x) == 4.0


def test_bfloat16_sums_both_products_before_it_rounds():
    """256 + 0.75 + 0.75: each rounded alone to bfloat16 would stay 256."""
    params = {
        "weight": jnp.array([[256.0, 0.75]]),
        "lora_A": jnp.array([[0.0, 1.0]]),
        "lora_B": jnp.array([[0.75]]),
    }
    x = jnp.ones((1, 2), jnp.bfloat16)
    for product_dtype in (None, jnp.float32):  # of the learner, and of a worker
        linear = Linear(1, bias=False, product_dtype=product_dtype)
        found = linear.apply({"params": params}, x)
        assert found.dtype == jnp.bfloat16 and float(found[0, 0]) == 258.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_derivatives_of_a_wide_product_are_those_of_the_product(dtype):
    rng = np.random.default_rng(0)
    x, w, d_y = (jnp.asarray(rng.normal(size=s), dtype) for s in ((2, 3, 4), (5, 4), (2, 3, 5)))
    plain = lambda x, w: jnp.einsum("...i,oi->...o", x, w)
    ours, theirs = (jax.vjp(f, x, w)[1] for f in (wide_product, plain))
    for one, other in zip(ours(d_y.astype(jnp.float32)), theirs(d_y), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(
            np.float32(one),
            np.float32(other),
            rtol=1e-5 if dtype == jnp.float32 else 2e-2,
            atol=1e-2,
        )


def test_a_fresh_adapter_changes_nothing_and_a_moved_one_does():
    base = from_named(random_named(CONFIG), CONFIG, stacked=True)
    shape = make_shape()
    before = logits_of(base)
    np.testing.assert_array_equal(logits_of(join(base, init_adapter(shape, CONFIG, 0))), before)
    moved = logits_of(join(base, random_adapter(shape)))
    assert np.abs(moved - before).max() > 0.1


@pytest.mark.parametrize("name", ["qwen2-tied", "llama-biases"])
@pytest.mark.parametrize("stacked", [True, False])
def test_merged_weights_compute_what_the_adapter_does(name, stacked):
    config = from_hf(HF_CONFIGS[name])
    shape = make_shape(config=config)
    adapter = random_adapter(shape, config)
    base = from_named(random_named(config), config, stacked=stacked)
    if not stacked:
        named = to_named_adapter(adapter)
        adapter = from_named_adapter(named, shape, config, stacked=False)
    merged = merge(join(base, adapter), shape.scale)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    # Float32 sums in another order, of logits around 10.
    np.testing.assert_allclose(
        logits_of(merged, config), logits_of(join(base, scaled(adapter, shape)), config), atol=2e-4
    )


def test_only_the_targets_have_an_adapter():
    shape = make_shape(targets=("q_proj", "*.mlp.*"))
    assert shape.modules == (
        "self_attn.q_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    assert set(adapter_leaves(init_adapter(shape, CONFIG, 0))) == set(shape.modules)
    assert shape.scale == 1.5
    sizes = projections(CONFIG)
    assert sizes["self_attn.q_proj"] == (64, 32) and sizes["mlp.down_proj"] == (32, 64)
    leaves = jax.tree.leaves(init_adapter(shape, CONFIG, 0))
    assert adapter_parameters(shape, CONFIG) == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize(
    "targets",
    [("q_proj",), ("self_attn.q_proj",), ("model.layers.*.self_attn.q_proj",), ("*q_p*",)],
)
def test_a_pattern_may_be_a_whole_name_or_its_end(targets):
    assert make_shape(targets=targets).modules == ("self_attn.q_proj",)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(targets=("q_proj", "qproj")),
            "targets: 'qproj' matches no linear projection .*_proj",
        ),
        (dict(targets=("lm_head",)), "targets: 'lm_head' matches no linear projection"),
        (dict(targets=("model.layers.0.*",)), "in layer 0 but not in layer 1: .*model.layers.\\*"),
        (dict(rank=33), r"rank=33 is larger than self_attn.q_proj allows, .*\[64, 32\].* 32 or"),
    ],
)
def test_what_no_adapter_can_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_shape(**change)


def test_a_fresh_adapter_follows_from_its_seed_and_is_peft_s():
    shape = make_shape()
    first, again, other = (adapter_leaves(init_adapter(shape, CONFIG, s)) for s in (3, 3, 4))
    for module, (_, width) in projections(CONFIG).items():
        a = first[module]["lora_A"]
        np.testing.assert_array_equal(a, again[module]["lora_A"])
        assert (a != other[module]["lora_A"]).any()
        assert 0.9 < np.abs(a).max() * width**0.5 <= 1
        assert not first[module]["lora_B"].any()


def test_names_go_there_and_back():
    shape = make_shape(targets=("v_proj", "down_proj"))
    adapter = random_adapter(shape)
    named = to_named_adapter(adapter)
    assert {name: leaf.shape for name, leaf in named.items()} == adapter_shapes(shape, CONFIG)
    assert named["model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 64)
    back = from_named_adapter(named, shape, CONFIG, stacked=True)
    jax.tree.map(np.testing.assert_array_equal, back, adapter)


def test_named_matrices_that_do_not_belong_are_refused():
    shape = make_shape(targets=("v_proj",))
    named = to_named_adapter(random_adapter(shape))
    name = "model.layers.1.self_attn.v_proj.lora_B.weight"
    for changed, message in (
        ({n: leaf for n, leaf in named.items() if n != name}, f"lack {name}"),
        ({**named, "x": named[name]}, "have, beyond the adapter, x"),
        ({**named, name: named[name].T}, r"wrong shape: .*\[4, 32\] instead of \[32, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            from_named_adapter(changed, shape, CONFIG, stacked=True)


def test_a_deep_model_has_one_compilation_for_all_layers():
    """Joined trees keep the leading layer axis that the scan needs."""
    config = ModelConfig(
        model_type="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=5,
        num_heads=1, num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    joined = join(
        from_named(random_named(config), config, stacked=True),
        init_adapter(make_shape(rank=2, config=config), config, 0),
    )
    assert {leaf.shape[0] for leaf in jax.tree.leaves(joined["layers"])} == {5}
