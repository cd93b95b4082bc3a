"""Rotary position embedding in Hugging Face's half-split convention, with its scalings.

Dimension key:
    B: sequences
    T: tokens
    N: heads
    H: head size
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig, RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Angular step per position of every pair, and the factor on cos and sin.

    Returns:
        float64 [H/2] in radians per position, and the attention factor (1.0 but for yarn).

    Raises:
        ValueError: if the kind of scaling is unknown.
    """
    rope = config.rope
    H = config.head_dim
    inverse = rope.theta ** (-np.arange(0, H, 2, dtype=np.float64) / H)
    match rope.kind:
        case "default":
            return inverse, 1.0
        case "linear":
            return inverse / rope.factor, 1.0
        case "llama3":
            return _llama3(inverse, rope, _original_length(config)), 1.0
        case "yarn":
            return _yarn(inverse, rope, _original_length(config)), _yarn_attention_factor(rope)
    raise ValueError(f"unknown rope type {rope.kind!r}: known are {', '.join(ROPE_KINDS)}")


def _original_length(config: ModelConfig) -> int:
    return config.rope.original_max_position_embeddings or config.max_position_embeddings


def _llama3(inverse: np.ndarray, rope: RopeConfig, original_length: int) -> np.ndarray:
    """Long waves are stretched by the factor, short ones kept, those between blended linearly.

    Source: the Llama 3.1 release; the blend runs over turns within the original context.
    """
    turns = original_length * inverse / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return inverse * (kept + (1 - kept) / rope.factor)


def _yarn(inverse: np.ndarray, rope: RopeConfig, original_length: int) -> np.ndarray:
    """Source: YaRN (arXiv:2309.00071), section 3.2, with Hugging Face's rounding of the ramp."""
    pairs = len(inverse)

    def pair_that_turns(times: float) -> float:
        """Index of the pair, as a real number, that turns so often in the original context."""
        return pairs * math.log(original_length / (times * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # a ramp of no width would divide by zero
    stretched = np.clip((np.arange(pairs) - first) / width, 0.0, 1.0)
    return inverse * (1 - stretched + stretched / rope.factor)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Source: YaRN, section 3.4; the quotient of two such factors is DeepSeek's variant."""

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def rotary(position_BT: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of every position, float32 [B, T, 1, H/2] each."""
    inverse, factor = inverse_frequencies(config)
    angle = position_BT[..., None, None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (i, i + H/2) of every head by their angle; float32 inside, dtype of x out."""
    cos, sin = cos_sin
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
