"""Memory of this process's devices: what is in use, as their platform counts it, and its kinds."""

from collections.abc import Sequence

import jax

HOST_MEMORY = "pinned_host"
"""The kind of memory of the host that devices read and write, by its name in jax."""


def device_memory(devices: Sequence[jax.Device]) -> tuple[int, int] | None:
    """Bytes in use on these devices together, and the most on each at once, summed.

    None where the platform does not report it, as on a CPU. Cheap enough to call every second.
    """
    stats = [device.memory_stats() or {} for device in devices]
    if not all({"bytes_in_use", "peak_bytes_in_use"} <= one.keys() for one in stats):
        return None  # some allocators do not count
    return (
        sum(one["bytes_in_use"] for one in stats),
        sum(one["peak_bytes_in_use"] for one in stats),
    )
