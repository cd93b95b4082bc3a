"""Variants of the decode loop that are compared: how each runs the same model and requests."""

import dataclasses
import difflib
from typing import Any

import jax.numpy as jnp

from rollout_worker.engine_setup import DecodeAttention, choose_attention

DTYPES = ("bfloat16", "float32")
LOOPS = ("while", "python")
MOST_TOKENS = 2**20
"""Of a segment and of a prefill call."""
ATTENTIONS = ("auto", "bf16", "f32", "pallas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the same model on the same requests."""

    loop: str = "while"
    """`python` returns to the host after every token."""
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
