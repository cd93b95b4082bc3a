"""Rotary position embedding in Hugging Face's half-split convention, with its scalings.

Dimension key:
    B: sequences
    T: tokens
    N: heads
    H: head size
"""

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Angular step per position of every pair, and the factor on cos and sin.

    Returns:
        float64 [H/2] in radians per position, and the attention factor (1.0 but for yarn).

    Raises:
        ValueError: if the kind of scaling is unknown.
    """
    H = config.head_dim
    inverse = config.rope.theta ** (-np.arange(0, H, 2, dtype=np.float64) / H)
    if config.rope.kind == "default":
        return inverse, 1.0
    raise ValueError(f"unknown rope type {config.rope.kind!r}")


def rotary(position_BT: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position, float32 [B, T, 1, H/2] each."""
    inverse, factor = inverse_frequencies(config)
    angle = position_BT[..., None, None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (i, i + H/2) of every head by their angle; float32 inside, dtype of x out."""
    cos, sin = cos_sin
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
