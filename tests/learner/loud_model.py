"""A model of four layers in which each has its say, for tests of what a worker samples with."""

import functools

import jax

from models.config import ModelConfig
from tests.learner import builders

MODEL = ModelConfig(
    model_type="qwen2",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    tie_word_embeddings=False,
)


@functools.cache
def loud_params(seed: int = 3):
    """Host weights so large that no distribution is near uniform."""
    return jax.tree.map(lambda leaf: 4.0 * leaf, builders.host_params(MODEL, seed=seed))
