"""Settings of a decode bench, checked as a whole before anything is made."""

import dataclasses

import jax
import numpy as np

from benchmarks.decode.engine_passes import decode_spec
from benchmarks.decode.random_requests import Lognormal
from benchmarks.decode.variants import Variant
from benchmarks.decode.weights import copy_bytes
from benchmarks.kernels.case import available_bytes
from models.config import ModelConfig
from rollout_worker.engine.decode_programs import DecodePrograms
from rollout_worker.engine.engine_limits import EngineLimits, geometry_of
from rollout_worker.engine.layout import Layout, make_mesh

HF = "hf"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """All settings of one bench."""

    shape: str
    """Name of the shape, or path of the model."""
    model: ModelConfig
    path: str | None
    """Of the weights; None draws them."""
    dtype: str
    """Of the weights."""
    variants: dict[str, Variant]
    """By name; the first is what ratios refer to."""
    slots: tuple[int, ...]
    """Each of all lanes together."""
    tensor: int
    prompt: int
    new: int
    """Tokens of a completion, where no lengths are drawn."""
    cache: int | None
    """Columns of the widest cache; None takes what prompt and completion need."""
    repeat: int
    seed: int
    lengths: Lognormal | None = None
    requests: int = 512
    """Of which the lengths are drawn."""
    group: int | None = None
    against: str | None = None

    @property
    def longest_completion(self) -> int:
        """Tokens."""
        return self.lengths.most if self.lengths else self.new

    @property
    def is_steady(self) -> bool:
        """Whether token steps are timed: where nothing else is asked for."""
        return self.lengths is None and self.group is None

    def limits(self, variant: Variant) -> EngineLimits:
        """What a variant's engine is built for."""
        return EngineLimits(
            max_prompt_tokens=self.prompt,
            max_new_tokens=self.longest_completion,
            cache_tokens=self.cache or self.prompt + self.longest_completion,
            prefill_tokens=variant.prefill_tokens,
        )

    def layout(self, devices: list[jax.Device]) -> Layout:
        """Lanes over all devices.

        Raises:
            ValueError: if --tensor fits neither the devices nor the model.
        """
        if len(devices) % self.tensor:
            raise ValueError(f"--tensor {self.tensor} must divide the {len(devices)} devices")
        mesh = make_mesh(devices, len(devices) // self.tensor, self.tensor)
        return Layout(self.model, mesh, np.dtype(jax.numpy.dtype(self.dtype)))


def check_settings(settings: DecodeSettings, layout: Layout) -> None:
    """Refuses what cannot be measured, before anything is made.

    Raises:
        ValueError: naming the value, the rule and what to write.
    """
    _check_ranges(settings)
    _check_slots(settings, layout)
    for name, variant in settings.variants.items():
        geometry_of(decode_spec(layout, variant, settings.slots[0]), settings.limits(variant))
        if settings.is_steady and variant.loop == "while":
            _check_segments(settings.new, name, variant)
    if settings.group is not None:
        _check_group(settings, settings.group)
    if settings.against is not None and not settings.is_steady:
        raise ValueError("--against takes neither --lengths nor --group: it times whole batches")
    _check_memory(settings, layout)


def _check_ranges(settings: DecodeSettings) -> None:
    for name in ("prompt", "new", "repeat", "requests", "tensor", "cache", "group"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
        if value is not None and value >= 2**31:
            raise ValueError(f"--{name} must be below 2**31, got {value}")
    if not 0 <= settings.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {settings.seed}")


def _check_slots(settings: DecodeSettings, layout: Layout) -> None:
    if len(set(settings.slots)) < len(settings.slots):
        raise ValueError(f"--slots must differ, got {settings.slots}")
    for slots in settings.slots:
        check_slot_count(slots, lanes=layout.mesh.shape["data"])


def check_slot_count(slots: int, *, lanes: int) -> None:
    """Raises ValueError unless every lane gets the same number of slots."""
    if slots < 1 or slots % lanes:
        raise ValueError(f"--slots {slots} must be a positive multiple of the {lanes} lanes")


def _check_group(settings: DecodeSettings, group: int) -> None:
    if group > min(settings.slots):
        raise ValueError(
            f"--group {group} must be at most --slots {min(settings.slots)}: all of it is to be "
            "decoded at once"
        )
    if settings.prompt < 2:
        raise ValueError("--group needs --prompt 2 or more: a single token has no prefill")


def _check_segments(new: int, name: str, variant: Variant) -> None:
    """Of a completion, the first segment lies beside prefill and the last may be cut short."""
    if new < 3 * variant.segment_tokens:
        raise ValueError(
            f"--new {new} leaves no whole segment of {variant.segment_tokens} tokens to time "
            f"({name}): raise --new to {3 * variant.segment_tokens}, or lower --segment-tokens"
        )


def _check_memory(settings: DecodeSettings, layout: Layout) -> None:
    """Weights, caches and prefix pools at once, as far as the device says what it has."""
    device = layout.mesh.devices.flat[0]
    shared = len(layout.mesh.devices.flat) if device.platform == "cpu" else 1
    most = 0
    for slots in settings.slots:
        needed = 0
        for variant in settings.variants.values():
            spec = decode_spec(layout, variant, slots)
            programs = DecodePrograms(spec, geometry_of(spec, settings.limits(variant)))
            needed += programs.cache_bytes(programs.geometry.widths[-1]) + programs.pool_bytes()
        most = max(most, needed)
    whole = shared * (copy_bytes(layout) + most)
    available = available_bytes(device)
    if available is not None and whole > available:
        raise ValueError(
            f"weights and caches need {whole / 1e9:.1f} GB and the device has "
            f"{available / 1e9:.1f} GB: lower --slots, --layers, --prompt or --new, or compare less"
        )
