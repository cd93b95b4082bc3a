"""What the bench is asked: a model's shape, the variants that compete, the lengths of a mix."""

import dataclasses
import difflib
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig, RopeConfig
from rollout_worker.engine_setup import DecodeAttention, choose_attention

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
DTYPES = ("bfloat16", "float32")
LOOPS = ("while", "python")
MOST_TOKENS = 2**20
"""Of a segment and of a prefill call."""
ATTENTIONS = ("auto", "bf16", "f32", "pallas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the same model on the same requests."""

    loop: str = "while"
    """`python` has the host look at every token."""
    attention: str = "auto"
    """`bf16` and `f32` are XLA with operands of that dtype, `pallas` is the kernel; `auto` is what
    the service takes on the platform."""
    compute_dtype: str = "bfloat16"
    segment_tokens: int = 64
    prefill_tokens: int = 512

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be one of {', '.join(allowed)}"
                )
        for name in ("segment_tokens", "prefill_tokens"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise ValueError(
                    f"{name} must be from 1 to {MOST_TOKENS}, got {getattr(self, name)}"
                )

    def attention_of(self, platform: str, head_dim: int) -> DecodeAttention:
        """What attends on a platform.

        Raises:
            ValueError: if there is no Pallas kernel for the platform or the head size.
        """
        return choose_attention(
            self.attention,
            compute_dtype=jnp.dtype(self.compute_dtype),
            platform=platform,
            head_dim=head_dim,
        )


_CHOICES = {"loop": LOOPS, "attention": ATTENTIONS, "compute_dtype": DTYPES}


def parse_variants(base: Variant, text: str | None) -> dict[str, Variant]:
    """The base and what is compared with it, by name.

    Args:
        text: changes of one variant joined by `+`, variants by commas, such as
            `loop=python,attention=f32+loop=python`; None compares nothing.

    Raises:
        ValueError: naming the change, the rule and what to write.
    """
    named = {f"loop={base.loop} attention={base.attention}": base}
    for part in text.split(",") if text is not None else ():
        named[part] = _changed(base, part)
    values = list(named.values())
    if len(set(values)) < len(values):
        raise ValueError(f"--compare {text!r} names one variant twice, or the one it starts from")
    return named


def _changed(base: Variant, text: str) -> Variant:
    known = {field.name: field.type for field in dataclasses.fields(Variant)}
    changes: dict[str, Any] = {}
    for change in text.split("+"):
        name, equals, value = change.partition("=")
        if not equals or name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise ValueError(
                f"--compare {change!r} is no change: write NAME=VALUE, with one of "
                f"{', '.join(known)}{hint}"
            )
        if isinstance(getattr(base, name), int):
            if not value.isdecimal():
                raise ValueError(f"--compare {change!r}: {name} takes a whole number")
            changes[name] = int(value)
        else:
            changes[name] = value
    return dataclasses.replace(base, **changes)


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """Lengths of completions whose logarithm is normal."""

    mean: float
    """Of the lengths, before they are cut off."""
    most: int
    """Longer ones are cut off here, as max_new_tokens does."""
    sigma: float
    """Standard deviation of the logarithm."""

    def draw(self, count: int, seed: int) -> np.ndarray:
        """int64 [count], each from 1 to `most`."""
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.random.default_rng(seed).lognormal(location, self.sigma, count)
        return np.clip(np.rint(drawn).astype(np.int64), 1, self.most)


def parse_lengths(text: str) -> Lognormal:
    """Reads `lognormal:mean=220,max=1024`, with `sigma=` (0.8) if wanted.

    Raises:
        ValueError: naming the value, the rule and what to write.
    """
    kind, _, rest = text.partition(":")
    form = "write lognormal:mean=220,max=1024, with ,sigma=0.8 if wanted"
    if kind != "lognormal":
        raise ValueError(f"--lengths {text!r} is of no known kind: {form}")
    values = {"sigma": 0.8}
    for part in rest.split(","):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in ("mean", "max", "sigma") or not value > 0 or math.isinf(value):
            raise ValueError(f"--lengths {part!r} is no positive mean, max or sigma: {form}")
        values[name] = value
    if not {"mean", "max"} <= set(values) or values["max"] % 1 or values["mean"] > values["max"]:
        raise ValueError(f"--lengths {text!r} needs a mean and a whole max above it: {form}")
    return Lognormal(values["mean"], int(values["max"]), values["sigma"])


def prompts(count: int, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """int32 [count, length]: random ids."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocab_size, (count, length), dtype=np.int32)
