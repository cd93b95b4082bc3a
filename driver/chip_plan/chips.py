"""Kinds of chips that a plan can be made for.

Memory is what the compiler of that chip says it may use; the rates are the published ones.
"""

import dataclasses

LIBTPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the TPU compiler is asked for by name; no device may be looked for
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",  # some dump flags would fill it with gigabytes of stack traces
    "TPU_MIN_LOG_LEVEL": "10",
    "TPU_STDERR_LOG_LEVEL": "10",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""To be set before jax is imported. The accelerator type is that of any host: a topology is asked
for by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChipKind:
    """One kind of accelerator."""

    name: str
    usable_bytes: int
    """Of one chip's memory, for programs and their arrays."""
    clock_hz: float
    """At which its matrix units make the published rate of bfloat16 products."""
    flops_per_s: float
    bytes_per_s: float
    """Of its memory."""
    wire_bytes_per_s: float
    """To its neighbours, over all links in one direction."""
    slices: dict[int, str]
    """The part of a topology that a process sees, by the number of its chips."""
    host_chips: int
    """Most chips of one host."""


_FLAT = {
    **{1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"},
    **{128: "8x16", 256: "16x16"},
}
_CUBE = {
    **{1: "1x1x1", 2: "1x2x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"},
    **{128: "4x4x8"},
}
V6E = ChipKind(
    name="v6e",
    usable_bytes=round(31.25 * 2**30),
    clock_hz=1.75e9,
    flops_per_s=918e12,
    bytes_per_s=1.64e12,
    wire_bytes_per_s=3.584e12 / 8 / 2,
    slices=_FLAT,
    host_chips=8,
)
V5E = ChipKind(
    name="v5e",
    usable_bytes=round(15.75 * 2**30),
    clock_hz=1.5e9,
    flops_per_s=197e12,
    bytes_per_s=0.82e12,
    wire_bytes_per_s=1.6e12 / 8 / 2,
    slices=_FLAT,
    host_chips=8,
)
V5P = ChipKind(
    name="v5p",
    usable_bytes=round(95.74 * 2**30),
    clock_hz=1.75e9,
    flops_per_s=459e12,
    bytes_per_s=2.765e12,
    wire_bytes_per_s=4.8e12 / 8 / 2,
    slices=_CUBE,
    host_chips=4,
)
TPUS = {kind.name: kind for kind in (V6E, V5E, V5P)}
