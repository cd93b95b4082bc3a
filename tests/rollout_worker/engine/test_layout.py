"""The inference copy on a mesh: verdicts of the sizes, logits, collectives, and the way back.

Dimension key:
    B: rows
    T: tokens
    K: key/value heads of the copy
    S: cache positions
    H: head size
    V: vocabulary
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention import attention
from models.config import ModelConfig
from models.files.checkpoint import from_named, to_named
from models.transformer import forward, head_weight, init_params, logits, packed_attend
from rollout_worker.engine.layout import (
    Layout,
    check_tensor_parallel,
    embed,
    inference_config,
    make_mesh,
    transform_of,
)
from services.weights.digest import tree_digest
from tests.kernels.tpu_compiler import needs_compiler, run_with_compiler

pytestmark = pytest.mark.slow

BFLOAT16: np.dtype = np.dtype(ml_dtypes.bfloat16)
FLOAT32: np.dtype = np.dtype(np.float32)


def make_model(**changes) -> ModelConfig:
    """A vocabulary that 4 does not divide, fewer key/value heads than 4, and every bias."""
    settings = dict(
        model_type="qwen2",
        vocab_size=66,
        hidden_size=16,
        intermediate_size=48,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=4,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=True,
    )
    return ModelConfig(**{**settings, **changes})


def make_params(config: ModelConfig, dtype=FLOAT32):
    """Host arrays without two equal entries, so that a swap of any shows; layers listed."""
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    stacked = jax.tree.map(
        lambda leaf: rng.normal(scale=0.3, size=leaf.shape).astype(dtype), abstract
    )
    return from_named(to_named(stacked, config), config, stacked=False)


def make_layout(config: ModelConfig, data: int, tensor: int, dtype=FLOAT32) -> Layout:
    return Layout(config, make_mesh(jax.devices()[: data * tensor], data, tensor), dtype)


@functools.partial(jax.jit, static_argnums=1)
def logits_of(params, config: ModelConfig, token_ids_BT) -> jax.Array:
    """Float32 [B, T, V] of whole sequences."""
    B, T = token_ids_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    attend = packed_attend(jnp.ones((B, T), jnp.int32), operand_dtype=jnp.float32)
    hidden_BTD, _ = forward(
        *(params, config, token_ids_BT, position_BT, attend),
        compute_dtype=jnp.float32,
        embed=embed,
    )
    return logits(hidden_BTD, head_weight(params))


def some_tokens(config: ModelConfig) -> jax.Array:
    """int32 [4, 6], the last id of the vocabulary among them."""
    token_ids_BT = np.random.default_rng(1).integers(0, config.vocab_size, (4, 6))
    token_ids_BT[0, 0] = config.vocab_size - 1
    return jnp.asarray(token_ids_BT, jnp.int32)


def k01_rows(cases):
    case = cases("sharding")["K01"]
    return zip(case["input"]["rows"], case["expected"]["verdict"], strict=True)


def test_k01_the_sizes_decide(cases):
    for (heads, kv_heads, tensor), verdict in k01_rows(cases):
        if verdict.startswith("reject"):
            with pytest.raises(ValueError, match=f"tensor={tensor} does not fit"):
                check_tensor_parallel(heads, kv_heads, 14 * 48, tensor)
        else:
            copied = re.search(r"device d uses kv head d//(\d+)", verdict)
            copies = int(copied[1]) if copied else 1
            assert check_tensor_parallel(heads, kv_heads, 14 * 48, tensor) == copies


def test_k01_the_copy_of_accepted_sizes_gives_the_logits_of_the_published_model(cases):
    for (heads, kv_heads, tensor), verdict in k01_rows(cases):
        if verdict.startswith("reject"):
            continue
        config = make_model(
            num_heads=heads, num_kv_heads=kv_heads, intermediate_size=112, num_layers=1
        )
        params = make_params(config)
        copy = inference_config(config, tensor)
        named = {
            name: transform_of(name, config, tensor).apply(array)
            for name, array in to_named(params, config).items()
        }
        token_ids_BT = some_tokens(config)
        actual = logits_of(from_named(named, copy, stacked=False), copy, token_ids_BT)
        expected = logits_of(params, config, token_ids_BT)
        # The same products; XLA may add them up in another order in other shapes.
        np.testing.assert_allclose(actual[..., : config.vocab_size], expected, atol=1e-5)
        if copy.num_kv_heads > kv_heads:
            key = "model.layers.0.self_attn.k_proj.weight"
            held = named[key].reshape(tensor, config.head_dim, -1)
            published = params["layers"][0]["self_attn"]["k_proj"]["weight"]
            heads_KHD = published.reshape(kv_heads, config.head_dim, -1)
            for device in range(tensor):
                assert np.array_equal(held[device], heads_KHD[device // (tensor // kv_heads)])


@pytest.mark.parametrize(
    "sizes, parts",
    [
        ((14, 2, 4864, 4), ["tensor=4", "num_heads=14", "set it to 2"]),
        ((12, 3, 48, 2), ["tensor=2", "num_kv_heads=3", "set it to 1 or 3"]),
        ((16, 16, 24, 16), ["tensor=16", "intermediate_size=24", "set it to 8"]),
        ((16, 2, 64, 0), ["tensor=0", "at least 1", "set it to 1"]),
    ],
)
def test_a_size_that_does_not_fit_names_the_rule_and_the_nearest_that_do(sizes, parts):
    with pytest.raises(ValueError) as refusal:
        check_tensor_parallel(*sizes)
    for part in parts:
        assert part in str(refusal.value)


def test_a_mesh_that_does_not_cover_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"data=3 x tensor=2 = 6 must equal the 8 devices"):
        make_mesh(jax.devices(), 3, 2)


@pytest.mark.parametrize("data, tensor", [(1, 2), (2, 4)])
def test_logits_on_a_mesh_are_those_of_one_device(data, tensor):
    config = make_model()
    params, token_ids_BT = make_params(config), some_tokens(config)
    layout = make_layout(config, data, tensor)
    rows = NamedSharding(layout.mesh, P("data"))
    copy = layout.to_inference(params)
    actual = logits_of(copy, layout.config, jax.device_put(token_ids_BT, rows))
    # Sums over heads, hidden width and devices in another order: float32 rounding of logits
    # that reach 10.
    expected = logits_of(params, config, token_ids_BT)
    np.testing.assert_allclose(actual[..., : config.vocab_size], expected, atol=2e-5)
    assert layout.config.vocab_size - config.vocab_size == {2: 0, 4: 2}[tensor]
    assert not np.any(actual[..., config.vocab_size :])


@pytest.mark.parametrize("published, kept", [(BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32)])
@pytest.mark.parametrize("data, tensor", [(2, 1), (2, 4)])
def test_the_copy_reads_back_as_published(published, kept, data, tensor):
    config = make_model()
    named = to_named(make_params(config, published), config)
    layout = make_layout(config, data, tensor, kept)
    copy = layout.to_inference(from_named(named, config, stacked=True))
    assert {leaf.dtype for leaf in jax.tree.leaves(copy)} == {kept}
    views = layout.from_inference(copy, {name: array.dtype for name, array in named.items()})
    assert tree_digest(views) == tree_digest(named)


def test_one_changed_weight_on_one_device_changes_the_digest():
    config = make_model()
    named = to_named(make_params(config), config)
    layout = make_layout(config, 1, 4)
    copy = layout.to_inference(from_named(named, config, stacked=False))
    matrix = copy["layers"][1]["mlp"]["down_proj"]
    matrix["weight"] = matrix["weight"].at[3, -1].add(1.0)
    views = layout.from_inference(copy, {name: array.dtype for name, array in named.items()})
    assert tree_digest(views)[1] != tree_digest(named)[1]


def test_a_device_holds_its_part_of_every_matrix():
    config = make_model()
    layout = make_layout(config, 2, 4, BFLOAT16)
    copy = layout.to_inference(make_params(config))
    D, F, N, H, V = 16, 48, 8, 4, 68
    K = 4  # two heads, each kept twice
    layer = {
        "self_attn.q_proj.weight": (N * H // 4, D),
        "self_attn.k_proj.weight": (K * H // 4, D),
        "self_attn.v_proj.bias": (K * H // 4,),
        "self_attn.o_proj.weight": (D, N * H // 4),
        "self_attn.o_proj.bias": (D,),
        "self_attn.k_norm.weight": (H,),
        "mlp.gate_proj.weight": (F // 4, D),
        "mlp.up_proj.bias": (F // 4,),
        "mlp.down_proj.weight": (D, F // 4),
        "input_layernorm.weight": (D,),
    }
    expected = {f"model.layers.1.{name}": shape for name, shape in layer.items()}
    expected |= {"model.embed_tokens.weight": (V // 4, D), "lm_head.weight": (V // 4, D)}
    named = to_named(copy, layout.config)
    held = {name: {s.data.shape for s in named[name].addressable_shards} for name in expected}
    assert held == {name: {shape} for name, shape in expected.items()}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, copy)
    assert shardings == jax.tree.map(lambda leaf: leaf.sharding, layout.abstract_params())


def test_a_token_is_looked_up_in_the_rows_of_its_device():
    config = make_model()
    params, token_ids_BT = make_params(config, BFLOAT16), some_tokens(config)
    layout = make_layout(config, 2, 4, BFLOAT16)
    table = layout.to_inference(params)["embed_tokens"]
    lanes = jax.shard_map(
        embed, mesh=layout.mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}
    )
    actual = jax.jit(lanes)(table, token_ids_BT)
    assert actual.dtype == BFLOAT16
    assert np.array_equal(actual, params["embed_tokens"]["weight"][token_ids_BT])


def decode_text(devices, data: int, tensor: int, dtype) -> str:
    """The compiled program of some token steps of all lanes, up to sharded logits."""
    config = make_model(
        vocab_size=1022, hidden_size=256, intermediate_size=512, num_heads=8, head_dim=128
    )
    layout = Layout(config, make_mesh(devices, data, tensor), dtype)
    B, S, K, H = 8, 128, layout.config.num_kv_heads, config.head_dim
    rows = NamedSharding(layout.mesh, P("data"))
    id_B = jax.ShapeDtypeStruct((data * B,), jnp.int32, sharding=rows)
    leaf = jax.ShapeDtypeStruct((data * B, K, S, H), dtype, sharding=layout.cache_sharding)
    cache = [(leaf, leaf)] * config.num_layers

    def attend(query_B1NH, key_B1KH, value_B1KH, layer_cache):
        new = [
            cached.at[:, :, 0].set(fresh[:, 0].astype(dtype))
            for cached, fresh in zip(layer_cache, (key_B1KH, value_B1KH), strict=True)
        ]
        key_BSKH, value_BSKH = (cached.transpose(0, 2, 1, 3) for cached in new)
        visible_B1S = jnp.ones((query_B1NH.shape[0], 1, S), bool)
        out = attention(query_B1NH, key_BSKH, value_BSKH, visible_B1S, operand_dtype=dtype)
        return out, tuple(new)

    def steps(params, token_B, cache):
        def step(_, state):
            token_B, cache = state
            hidden_B1D, cache = forward(
                *(params, layout.config, token_B[:, None], token_B[:, None], attend),
                compute_dtype=dtype,
                cache=cache,
                embed=jax.named_call(embed, name="look_up"),
            )
            with jax.named_scope("head"):
                logits_BV = logits(hidden_B1D[:, 0], head_weight(params))
                return jnp.max(logits_BV, axis=-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, 3, step, (token_B, cache))

    lanes = jax.shard_map(
        steps,
        mesh=layout.mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    lowered = jax.jit(lanes, donate_argnums=2).lower(layout.abstract_params(), id_B, cache)
    return lowered.compile().as_text() or ""


def communication(text: str) -> collections.Counter[str]:
    """How often each kind of communication stands in a program, with the scope that asks for it."""
    kinds = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        kind = re.search(kinds, line)
        if kind:
            scope = re.search(r'op_name="[^"]*/(look_up|head|\w+_proj)/', line)
            found[f"{kind[1]} of {scope[1] if scope else 'something else'}"] += 1
    return found


ONE_STEP = {
    "all-reduce of o_proj": 2,  # of two layers, as the next
    "all-reduce of down_proj": 2,
    "all-reduce of look_up": 1,
    "all-reduce of head": 1,  # of this test: the largest logit
}


@pytest.mark.parametrize("data, tensor", [(4, 2), (2, 4), (1, 8)])
def test_a_token_step_sums_twice_in_a_layer_and_moves_no_weight(data, tensor):
    assert communication(decode_text(jax.devices(), data, tensor, FLOAT32)) == ONE_STEP


@needs_compiler
def test_a_token_step_communicates_no_more_on_v6e():
    run_with_compiler(
        """
from jax.experimental import topologies
from tests.rollout_worker.engine.test_layout import BFLOAT16, ONE_STEP, communication, decode_text
devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices
for data, tensor in [(4, 2), (2, 4), (1, 8)]:
    found = communication(decode_text(devices, data, tensor, BFLOAT16))
    assert found == ONE_STEP, (tensor, found)
"""
    )
