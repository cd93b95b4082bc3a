"""The one model definition, read by learner and rollout worker alike.

Parameters are a tree of arrays under their Hugging Face names. A matrix keeps Hugging Face's
[out, in] layout, so that loading, the wire and the export copy bytes and never transpose.
`params["layers"]` is either one tree whose leaves carry a leading layer axis (the learner scans
over it: one compilation for any depth) or a list of trees (the decode loop unrolls it). The caller
decides through `attend` how keys and values are stored.

Dimension key:
    B: sequences
    T: tokens
    D: model width
    F: hidden width of the MLP
    N: query heads
    K: key/value heads
    H: head size
    V: vocabulary (rows of the embedding)
    L: layers
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels.packed_attention.ops import WHOLE_SCORES, AttentionPlan, packed_attention
from models import layer_scan
from models.config import ModelConfig
from models.layer_scan import Backward, scan_layers
from models.rope import rotary, rotate

Params = dict[str, Any]
Attend = Callable[..., tuple[jax.Array, Any]]
"""(query_BTNH, key_BTKH, value_BTKH, layer_cache) -> (out_BTNH, new layer_cache)."""
Gather = Callable[[str, Params], Params]
"""(top-level name, its tree of one layer) -> the same tree, whole on this device."""
Embed = Callable[[Params, jax.Array], jax.Array]
"""(tree of embed_tokens, token_ids_BT) -> float32 or narrower [B, T, D]."""

_init = nn.initializers.normal(0.02)
LORA_A, LORA_B = "lora_A", "lora_B"
"""Beside a weight: the matrices of an adapter (models/adapter.py)."""


@jax.custom_vjp
def wide_product(x, weight):
    """The product x W^T in float32; its derivatives are products in the dtype of x."""
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)


def _wide_product_backward(operands, d_y):
    x, weight = operands
    d_y = d_y.astype(x.dtype)
    return jnp.einsum("...o,oi->...i", d_y, weight), jnp.einsum("...o,...i->oi", d_y, x)


wide_product.defvjp(
    lambda x, weight: (wide_product(x, weight), (x, weight)), _wide_product_backward
)


class Linear(nn.Module):
    """y = x W^T + b with W [out, in], computed in the dtype of x.

    Where the parameters have an adapter, (x A^T) B^T is added, with A [r, in] and B [out, r].
    """

    features: int
    bias: bool
    product_dtype: Any = None
    """Of x W^T before it is rounded to the dtype of x; None is that dtype."""

    @nn.compact
    def __call__(self, x):
        """[.., in] -> [.., out], in the dtype of x."""
        weight = self.param("weight", _init, (self.features, x.shape[-1]), jnp.float32)
        if self.has_variable("params", LORA_A):
            inner = self._product(x, self.get_variable("params", LORA_A)).astype(x.dtype)
            lora_b = self.get_variable("params", LORA_B)
            y = wide_product(x, weight.astype(x.dtype))  # so that the sum is rounded once
            y = (y + wide_product(inner, lora_b.astype(x.dtype))).astype(x.dtype)
        else:
            y = self._product(x, weight).astype(x.dtype)
        y = checkpoint_name(y, layer_scan.PRODUCT)
        if not self.bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return y + bias.astype(x.dtype)

    def _product(self, x, weight):
        """X W^T in product_dtype."""
        return jnp.einsum(
            "...i,oi->...o",
            x,
            weight.astype(x.dtype),
            preferred_element_type=self.product_dtype,
        )


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis; statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x):
        """[.., D] -> [.., D], in the dtype of x."""
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * weight.astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with its four projections; `attend` does the attending."""

    config: ModelConfig
    product_dtype: Any = None

    @nn.compact
    def __call__(self, x_BTD, rotary_BTH, attend, layer_cache):
        """Returns what is added to x, in its shape, and the new layer cache."""
        c = self.config
        *tokens, D = x_BTD.shape
        linear = partial(Linear, product_dtype=self.product_dtype)

        def heads(name, count):
            projected = linear(count * c.head_dim, c.qkv_bias, name=f"{name}_proj")(x_BTD)
            return projected.reshape(*tokens, count, c.head_dim)

        query_BTNH = heads("q", c.num_heads)
        key_BTKH = heads("k", c.num_kv_heads)
        value_BTKH = heads("v", c.num_kv_heads)
        if c.qk_norm:
            query_BTNH = RMSNorm(c.rms_norm_eps, name="q_norm")(query_BTNH)
            key_BTKH = RMSNorm(c.rms_norm_eps, name="k_norm")(key_BTKH)
        out_BTNH, layer_cache = attend(
            rotate(query_BTNH, rotary_BTH), rotate(key_BTKH, rotary_BTH), value_BTKH, layer_cache
        )
        out = linear(D, c.o_bias, name="o_proj")(out_BTNH.reshape(*tokens, -1))
        return out, layer_cache


class MLP(nn.Module):
    """The gated feed-forward of a layer: down(silu(gate x) * up x)."""

    config: ModelConfig
    product_dtype: Any = None

    @nn.compact
    def __call__(self, x_BTD):
        """[B, T, D] -> [B, T, D]."""
        c = self.config
        linear = partial(Linear, bias=c.mlp_bias, product_dtype=self.product_dtype)
        gate_BTF, up_BTF = (
            checkpoint_name(linear(c.intermediate_size, name=name)(x_BTD), layer_scan.MLP)
            for name in ("gate_proj", "up_proj")
        )
        return linear(x_BTD.shape[-1], name="down_proj")(nn.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    """One decoder layer; submodule names are Hugging Face's. Its arrays may have one axis [B T] in
    place of [B, T], if `attend` takes them so.
    """

    config: ModelConfig
    product_dtype: Any = None

    @nn.compact
    def __call__(self, x_BTD, rotary_BTH, attend, layer_cache):
        """Returns the layer's output, in the shape of x, and the new layer cache."""
        eps = self.config.rms_norm_eps
        normed = RMSNorm(eps, name="input_layernorm")(x_BTD)
        attended, layer_cache = Attention(self.config, self.product_dtype, name="self_attn")(
            normed, rotary_BTH, attend, layer_cache
        )
        x_BTD = x_BTD + attended
        normed = RMSNorm(eps, name="post_attention_layernorm")(x_BTD)
        mlp = MLP(self.config, self.product_dtype, name="mlp")
        return x_BTD + mlp(normed), layer_cache


def init_params(key: jax.Array, config: ModelConfig) -> Params:
    """Random float32 parameters with stacked layers: normal(0.02) matrices, unit norms."""
    embed_key, head_key, layer_key = jax.random.split(key, 3)

    def init_layer(key):
        x = jnp.zeros((1, 1, config.hidden_size))
        cos_sin = rotary(jnp.zeros((1, 1), jnp.int32), config)
        attend = lambda q, k, v, cache: (q, cache)
        return Block(config).init(key, x, cos_sin, attend, None)["params"]

    params = {
        "embed_tokens": {
            "weight": _init(embed_key, (config.vocab_size, config.hidden_size), jnp.float32)
        },
        "layers": jax.vmap(init_layer)(jax.random.split(layer_key, config.num_layers)),
        "norm": {"weight": jnp.ones((config.hidden_size,), jnp.float32)},
    }
    if not config.tie_word_embeddings:
        shape = (config.vocab_size, config.hidden_size)
        params["lm_head"] = {"weight": _init(head_key, shape, jnp.float32)}
    return params


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of `init_params`, without allocating anything."""
    return jax.eval_shape(lambda: init_params(jax.random.key(0), config))


def forward(
    params: Params,
    config: ModelConfig,
    token_ids_BT: jax.Array,
    position_BT: jax.Array,
    attend: Attend,
    *,
    compute_dtype: jnp.dtype,
    product_dtype: jnp.dtype | None = None,
    cache: Any = None,
    gather: Gather = lambda name, tree: tree,
    embed: Embed | None = None,
    backward: Backward | None = None,
) -> tuple[jax.Array, Any]:
    """Runs all layers and the final norm.

    Args:
        params: float32 or bfloat16 leaves, layers stacked or listed.
        token_ids_BT: int32.
        position_BT: int32; position of each token in its own sequence.
        attend: attention over this call's keys and values and whatever the cache holds.
        compute_dtype: dtype of activations and matrix products.
        product_dtype: dtype in which a layer's products are summed over devices and handed to the
            rounding into compute_dtype; None is compute_dtype. XLA:CPU has its fast bfloat16
            products only in float32, which a derivative would make slow on other devices.
        cache: per layer: a list beside listed layers, a stacked tree beside stacked ones.
        gather: makes sharded parameters whole, a layer at a time (see learner/update/sharding.py).
        embed: looks tokens up in an embedding that stays sharded; None gathers it.
        backward: how gradients of stacked layers are formed, where no cache is; None leaves it to
            jax.

    Returns:
        hidden [B, T, D] in compute_dtype, after the final norm, and the new cache.
    """
    if embed is None:
        x_BTD = look_up(gather("embed_tokens", params["embed_tokens"]), token_ids_BT)
    else:
        x_BTD = embed(params["embed_tokens"], token_ids_BT)
    x_BTD = x_BTD.astype(compute_dtype)
    cos_sin = rotary(position_BT, config)
    if backward is not None and backward.layout.flat:
        # [B T] of what is called BT, until the layers are done.
        x_BTD, cos_sin = jax.tree.map(flat, (x_BTD, cos_sin))
        attend = _flat_attend(attend, *token_ids_BT.shape)

    def run_block(x_BTD, layer_params, layer_cache):
        block = Block(config, product_dtype)
        return block.apply({"params": layer_params}, x_BTD, cos_sin, attend, layer_cache)

    whole_layer = partial(gather, "layers")
    if isinstance(params["layers"], list):
        new_cache = []
        for i, layer_params in enumerate(params["layers"]):
            layer_cache = None if cache is None else cache[i]
            x_BTD, layer_cache = run_block(x_BTD, whole_layer(layer_params), layer_cache)
            new_cache.append(layer_cache)
    elif backward is not None:
        layer = lambda x, weights: run_block(x, weights, None)[0]
        x_BTD = scan_layers(layer, x_BTD, params["layers"], whole_layer, backward)
        new_cache = None
    else:
        x_BTD, new_cache = jax.lax.scan(
            lambda x, xs: run_block(x, whole_layer(xs[0]), xs[1]), x_BTD, (params["layers"], cache)
        )
    norm = gather("norm", params["norm"])
    hidden_BTD = RMSNorm(config.rms_norm_eps).apply({"params": norm}, x_BTD)
    return cast(jax.Array, hidden_BTD).reshape(*token_ids_BT.shape, -1), new_cache


def flat(array_BT: jax.Array) -> jax.Array:
    """[B, T, ..] as [B T, ..]."""
    return array_BT.reshape(-1, *array_BT.shape[2:])


def _flat_attend(attend: Attend, B: int, T: int) -> Attend:
    """The same over arrays that have one axis for both."""

    def flat_attend(query, key, value, layer_cache):
        rows = (array.reshape(B, T, *array.shape[1:]) for array in (query, key, value))
        out_BTNH, layer_cache = attend(*rows, layer_cache)
        return flat(out_BTNH), layer_cache

    return flat_attend


def look_up(embed_tokens: Params, token_ids: jax.Array) -> jax.Array:
    """Rows of the embedding, float32 [.., D].

    Looked up in float32 whatever the dtype: the derivative adds up the many places of a frequent
    token, which bfloat16 would round away.
    """
    return embed_tokens["weight"].astype(jnp.float32)[token_ids]


def head_weight(params: Params, gather: Gather = lambda name, tree: tree) -> jax.Array:
    """The output matrix [V, D]: the embedding where the head is tied."""
    name = "lm_head" if "lm_head" in params else "embed_tokens"
    return gather(name, params[name])["weight"]


def logits(hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """float32 [.., V]: operands in the dtype of hidden, accumulated in float32."""
    return jnp.einsum(
        "...d,vd->...v",
        hidden_BTD,
        head_VD.astype(hidden_BTD.dtype),
        preferred_element_type=jnp.float32,
    )


def packed_attend(
    segment_BT: jax.Array, *, operand_dtype: jnp.dtype, plan: AttentionPlan = WHOLE_SCORES
) -> Attend:
    """Attention of a forward pass without a cache, over rows that pack several sequences."""
    impl = plan.impl_for(segment_BT.shape[1])

    def attend(query, key, value, layer_cache):
        out = packed_attention(
            query, key, value, segment_BT, operand_dtype=operand_dtype, impl=impl
        )
        return out, layer_cache

    return attend
