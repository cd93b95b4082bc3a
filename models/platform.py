"""Which platform a process computes on."""

import jax

NAMES = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


class WrongPlatform(RuntimeError):
    """The devices of this process are not of the platform that the run wants."""


def leave_accelerators() -> None:
    """Has this process compute on the CPU alone: it only reads files, and an accelerator may belong
    to a run. Has no effect once JAX has looked for devices.
    """
    jax.config.update("jax_platforms", "cpu")


def require_platform(wanted: str) -> list[jax.Device]:
    """Initialises JAX and returns this process's devices.

    Args:
        wanted: `cpu`, `gpu` or `tpu`.

    Raises:
        WrongPlatform: naming wanted and found, when the platform is absent, held by another
            process, or JAX chose another one.
    """
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the latter when a plug-in is not installed
        raise WrongPlatform(
            f"placement.platform={wanted} but JAX cannot initialise it here: {error!r}. Is the "
            "device present, its jax extra installed, and no other process holding it?"
        ) from error
    found = NAMES.get(devices[0].platform, devices[0].platform)
    if found != wanted:
        raise WrongPlatform(
            f"placement.platform={wanted}, but JAX found {found} ({len(devices)} x "
            f"{devices[0].device_kind}); set placement.platform={found} if that is what you want"
        )
    return devices
