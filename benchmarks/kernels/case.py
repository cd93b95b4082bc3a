"""What one bench measures: a problem of given sizes, and the implementations that are compared."""

import dataclasses

import jax
import jax.numpy as jnp
import psutil

from kernels import choose
from kernels.linear_objective.schedule import SCHEDULES

LOG_SOFTMAX = "log_softmax"
"""The baseline: `jax.nn.log_softmax` of whole logits, differentiated by autodiff."""
IMPLS = (*choose.CHOICES, LOG_SOFTMAX)
MODES = ("on_policy", "off_policy")
DTYPES = ("bfloat16", "float32")
SMALLEST = {"batch": 1, "time": 1, "hidden": 1, "vocab": 2}
"""Of a single column the gradient is zero, and relative errors say nothing."""
MOST = 2**63 - 1
"""Largest size of an axis; with larger ones sizes in bytes overflow."""
SEEDS = 2**32
"""Number of different seeds of `jax.random.key`; it takes others modulo this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One problem. Sizes are checked here, but not against the memory of a machine."""

    batch: int
    time: int
    hidden: int | None
    """Model width; None where the logits are given."""
    vocab: int
    dtype: str
    mode: str
    active_fraction: float | None
    """Share of the tokens that count; None where all do and nothing is masked."""
    temperature: float
    clip_low: float
    clip_high: float
    entropy_coef: float
    behavior_noise: float
    """Standard deviation of behaviour minus policy logprob, off policy; nats."""
    seed: int

    def __post_init__(self):
        for name, least in SMALLEST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, got {value}")
            if value is not None and value > MOST:
                raise ValueError(f"--{name} must be at most {MOST}, got {value}")
        if not self.temperature > 0:
            raise ValueError(f"--temperature must be above 0, got {self.temperature}")
        for name in ("clip_low", "clip_high", "behavior_noise"):
            if not getattr(self, name) >= 0:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be at least 0, got {getattr(self, name)}")
        if self.active_fraction is not None and not 0 < self.active_fraction <= 1:
            raise ValueError(
                f"--active-fraction must be above 0 and at most 1, got {self.active_fraction}"
            )
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"--seed must be at least 0 and below {SEEDS}, got {self.seed}")

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.batch * self.time

    @property
    def active_tokens(self) -> int:
        """Tokens that are not masked."""
        share = 1.0 if self.active_fraction is None else self.active_fraction
        return max(1, round(share * self.tokens))

    @property
    def noise(self) -> float:
        """Standard deviation of behaviour minus policy logprob; 0 on policy; nats."""
        return self.behavior_noise if self.mode == "off_policy" else 0.0

    @property
    def clip(self) -> dict[str, float]:
        """Arguments of the objective."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high}

    @property
    def least_bytes(self) -> int:
        """Of the large inputs and outputs, which every implementation needs at once."""
        value = jnp.dtype(self.dtype).itemsize
        if self.hidden is None:
            return 2 * self.tokens * self.vocab * value
        head = self.vocab * self.hidden * (value + 4)  # the head, and its gradient in float32
        return head + 2 * self.tokens * self.hidden * value

    @property
    def shape_text(self) -> str:
        """Sizes, dtype and mode for messages."""
        width = "" if self.hidden is None else f" H{self.hidden}"
        return f"B{self.batch} T{self.time}{width} V{self.vocab} {self.dtype} {self.mode}"


@dataclasses.dataclass(frozen=True)
class CompetitorSpec:
    """One competitor."""

    choice: str
    """What the user asked for, one of IMPLS."""
    impl: str
    """What that is on this platform: one of `kernels.choose.IMPLEMENTATIONS`, or LOG_SOFTMAX."""
    schedule: str | None
    """For the head alone, and there for the implementations that have one."""
    chunk_tokens: int | None = None
    """Bound on the tokens of a chunk; None takes what suits the implementation."""

    def __str__(self) -> str:
        return self.choice if self.schedule is None else f"{self.choice}:{self.schedule}"


def parse_competitor(
    text: str, *, platform: str, schedule: str | None, chunk_tokens: int | None = None
) -> CompetitorSpec:
    """Reads `impl` or `impl:schedule`.

    Args:
        platform: of the device, as `jax.Device.platform` has it.
        schedule: what `impl` alone runs with; None where there are no schedules.
        chunk_tokens: as CompetitorSpec has it.

    Raises:
        ValueError: naming the value, the rule and what to write.
    """
    choice, colon, own = text.strip().partition(":")
    if choice not in IMPLS:
        raise ValueError(f"an implementation is one of {', '.join(IMPLS)}; got {choice!r}")
    has_schedule = schedule is not None and choice not in (choose.REFERENCE, LOG_SOFTMAX)
    if colon and not has_schedule:
        raise ValueError(f"{choice} has no schedules here: write {choice!r} instead of {text!r}")
    if colon and own not in SCHEDULES:
        raise ValueError(f"a schedule is one of {', '.join(SCHEDULES)}; got {own!r} in {text!r}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"--chunk-tokens must be at least 1, got {chunk_tokens}")
    impl = choice if choice == LOG_SOFTMAX else choose.resolve(choice, platform)
    if not has_schedule:
        return CompetitorSpec(choice, impl, None)
    return CompetitorSpec(choice, impl, own if colon else schedule, chunk_tokens)


def available_bytes(device: jax.Device) -> int | None:
    """Memory that a program may still take on a device; None if unknown."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return psutil.virtual_memory().available if device.platform == "cpu" else None


class DoesNotFit(ValueError):
    """The device lacks the memory for what was asked."""


def check_fits(what: str, needed_bytes: int, available: int | None) -> None:
    """Refuses what memory cannot hold.

    Raises:
        DoesNotFit: with both sizes and what to do.
    """
    if available is not None and needed_bytes > available:
        raise DoesNotFit(
            f"{what} needs {needed_bytes / 1e9:.2f} GB and the device has "
            f"{available / 1e9:.2f} GB: lower --batch, --time or --vocab"
        )
