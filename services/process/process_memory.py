"""How much memory a process of a run holds, of its host and of its devices."""

import dataclasses

import psutil


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """At one moment; bytes."""

    host_bytes: int
    """Resident, without that of child processes."""
    device_bytes: int | None = None
    """In use on all of its devices together; None where the platform reports none, as a CPU."""
    device_peak_bytes: int | None = None
    """The most that was in use at once on each device, summed."""

    def metrics(self, process: str) -> dict[str, float]:
        """As `mem/*`; what is not known is left out."""
        return {
            f"mem/{process}/{name}": float(value)
            for name, value in dataclasses.asdict(self).items()
            if value is not None
        }


def process_memory(device: tuple[int, int] | None) -> ProcessMemory:
    """Of this process.

    Args:
        device: bytes in use and peak of its devices, where they are known.
    """
    in_use, peak = device or (None, None)
    return ProcessMemory(
        host_bytes=psutil.Process().memory_info().rss, device_bytes=in_use, device_peak_bytes=peak
    )
