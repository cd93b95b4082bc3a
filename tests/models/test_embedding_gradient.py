"""The derivative of the embedding lookup, where a frequent token adds up many places."""

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.transformer import forward, init_params

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=4,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


def test_many_places_of_one_token_are_not_rounded_away_in_bfloat16():
    """4096 places of one token: in bfloat16 a sum stops growing after some 256 equal parts."""
    params = init_params(jax.random.key(0), CONFIG)
    ids = jnp.ones((1, 4096), jnp.int32)

    def total(params, dtype):
        own_value = lambda query, key, value, cache: (jnp.zeros_like(query), cache)
        hidden, _ = forward(params, CONFIG, ids, ids * 0, own_value, compute_dtype=dtype)
        return (hidden.astype(jnp.float32) * jnp.arange(8.0)).sum()

    grads = [jax.grad(total)(params, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    exact, coarse = (np.asarray(g["embed_tokens"]["weight"][1]) for g in grads)
    assert np.abs(coarse - exact).max() < 0.05 * np.abs(exact).max()
