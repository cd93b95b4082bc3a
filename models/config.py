"""The shape of a decoder-only model of the Qwen2, Qwen3, Llama and SmolLM2 families."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields that a kind does not use keep their defaults."""

    theta: float = 10_000.0
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model; `from_hf` in `files/hf_config.py` reads a config.json."""

    model_type: str
    """`qwen2`, `qwen3` or `llama`, as Hugging Face writes it."""
    vocab_size: int
    """Rows of the embedding: may exceed the tokenizer's size."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
