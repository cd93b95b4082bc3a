"""Sizes of published models that the decode benches draw random weights for."""

import dataclasses
from typing import Any

from models.config import ModelConfig, RopeConfig

_QWEN25: dict[str, Any] = dict(
    model_type="qwen2",
    vocab_size=151936,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    qkv_bias=True,
)
SHAPES = {
    "qwen2.5-3b": ModelConfig(
        **_QWEN25,
        hidden_size=2048,
        intermediate_size=11008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
    ),
    "qwen2.5-1.5b": ModelConfig(
        **_QWEN25,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
    ),
    "qwen2.5-0.5b": ModelConfig(
        **{**_QWEN25, "head_dim": 64},
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
    ),
    "smollm2": ModelConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e5),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "demo": ModelConfig(
        model_type="qwen2",
        vocab_size=369,
        hidden_size=192,
        intermediate_size=512,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        qkv_bias=True,
    ),
}
"""Sizes of published models; `demo` is that of deploy/demo/model, with room for long mixes."""


def with_layers(model: ModelConfig, layers: int | None) -> ModelConfig:
    """The model cut to its first layers; None leaves it whole.

    Raises:
        ValueError: if the model has fewer.
    """
    if layers is None:
        return model
    if not 1 <= layers <= model.num_layers:
        raise ValueError(f"--layers must be from 1 to the model's {model.num_layers}, got {layers}")
    return dataclasses.replace(model, num_layers=layers)
