"""How much memory a process of a run holds, of its host and of its devices."""

import dataclasses
import os
import pathlib

_STATM = pathlib.Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """At one moment; bytes."""

    host_bytes: int
    """Resident, without that of child processes; 0 where the system does not tell."""
    device_bytes: int | None = None
    """In use on all of its devices together; None where the platform does not tell, as a CPU."""
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
    return ProcessMemory(host_bytes=_host_bytes(), device_bytes=in_use, device_peak_bytes=peak)


def _host_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0
