"""Sizes of published models that the decode benches draw random weights for."""

from driver.chip_plan.published_models import QWEN25_0_5B, QWEN25_1_5B, QWEN25_3B
from models.config import ModelConfig, RopeConfig

SHAPES = {
    "qwen2.5-3b": QWEN25_3B,
    "qwen2.5-1.5b": QWEN25_1_5B,
    "qwen2.5-0.5b": QWEN25_0_5B,
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
