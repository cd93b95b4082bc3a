"""What a shell may bring along that changes how JAX computes: every run computes alike, wherever it
is started.
"""

import pathlib
import re
from collections.abc import Mapping

from driver.config.load_config import ConfigError

FIXED = {
    "JAX_ALLOW_F16_REDUCTIONS": "1",
    "JAX_DEBUG_INFS": "0",
    "JAX_DEBUG_NANS": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "default",
    "JAX_DEFAULT_PRNG_IMPL": "threefry2x32",
    "JAX_DISABLE_JIT": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "JAX_ENABLE_CUSTOM_PRNG": "0",
    "JAX_ENABLE_X64": "0",
    "JAX_EXPLICIT_X64_DTYPES": "warn",
    "JAX_HIGH_DYNAMIC_RANGE_GUMBEL": "0",
    "JAX_LEGACY_PRNG_KEY": "allow",
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    "JAX_NUMPY_RANK_PROMOTION": "allow",
    "JAX_RANDOM_SEED_OFFSET": "0",
    "JAX_SOFTMAX_CUSTOM_JVP": "0",
    "JAX_THREEFRY_PARTITIONABLE": "1",
}
"""JAX's own defaults of the switches that change types, numbers, or what is an error. The learner
and the rollout workers get them, whatever the shells of their hosts say."""

_TRUE, _FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
_SAFE_FLAGS = {
    "xla_allow_excess_precision": _TRUE,
    "xla_cpu_enable_fast_math": _FALSE,
    "xla_cpu_enable_fast_min_max": _FALSE,
    "xla_gpu_enable_fast_min_max": _FALSE,
    "xla_disable_all_hlo_passes": _FALSE,
}
"""Flags of XLA that change numbers, with the values that do not."""
_FLAG = re.compile(r"--(\w+)(?:=(\S*))?")


def overridden(environ: Mapping[str, str]) -> list[str]:
    """A line for each switch of this shell that the processes of a run do not follow."""
    return [
        f"{name}={environ[name]} of this shell does not hold for the run: its processes have "
        f"{name}={value}"
        for name, value in FIXED.items()
        if environ.get(name, value).lower() not in _spellings(value)
    ]


def check_xla_flags(environ: Mapping[str, str]) -> None:
    """Refuses flags of XLA that change numbers: they cannot be taken back one by one.

    Raises:
        ConfigError: naming the flag.
    """
    for name, value in _xla_flags(environ):
        safe = _SAFE_FLAGS.get(name)
        if safe is not None and value.lower() not in safe:
            raise ConfigError(
                f"XLA_FLAGS of this shell has --{name}={value}, which changes the numbers that a "
                "run computes: remove this flag from XLA_FLAGS"
            )


def cpu_devices(environ: Mapping[str, str]) -> int:
    """How many CPU devices JAX makes in a process with this environment."""
    count = environ.get("JAX_NUM_CPU_DEVICES", "")
    forced = dict(_xla_flags(environ)).get("xla_force_host_platform_device_count", "")
    numbers = (int(text) for text in (count, forced) if text.isascii() and text.isdigit())
    return next((number for number in numbers if number), 1)


def _spellings(value: str) -> tuple[str, ...]:
    return next((same for same in (_TRUE, _FALSE) if value in same), (value,))


def _xla_flags(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Name and value of each flag, in order; XLA_FLAGS may also name a file of flags."""
    text = environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        try:
            text = pathlib.Path(text).read_text(errors="replace")
        except (OSError, ValueError):  # no file, or no path at all: JAX finds no flags there either
            return []
    return [(found[1], "true" if found[2] is None else found[2]) for found in _FLAG.finditer(text)]
