"""Which implementation of an operation runs: the one place that knows platforms.

An operation is called with the name of an implementation and detects nothing. What a user writes
(`auto`, `pallas`) becomes such a name here, once, when the devices of a role are known.
"""

REFERENCE = "reference"
XLA = "xla"
PALLAS_TPU = "pallas_tpu"
PALLAS_INTERPRET = "pallas_interpret"
"""The TPU kernels, interpreted on any device: exact, and slow beyond use except in tests."""

IMPLEMENTATIONS = (REFERENCE, XLA, PALLAS_TPU, PALLAS_INTERPRET)
CHOICES = ("auto", REFERENCE, XLA, "pallas")


def resolve(choice: str, platform: str) -> str:
    """The implementation that a choice means on a platform.

    Args:
        choice: one of CHOICES. `auto` is the Pallas kernels on a TPU and XLA elsewhere.
        platform: of the devices that will run it, as `jax.Device.platform` has it.

    Returns:
        One of IMPLEMENTATIONS.

    Raises:
        ValueError: if the choice is unknown, or is `pallas` on a GPU.
    """
    if choice not in CHOICES:
        raise ValueError(f"an implementation is one of {CHOICES}, got {choice!r}")
    if choice == "auto":
        return PALLAS_TPU if platform == "tpu" else XLA
    if choice != "pallas":
        return choice
    if platform == "tpu":
        return PALLAS_TPU
    if platform == "cpu":
        return PALLAS_INTERPRET
    raise ValueError(
        f"there is no Pallas kernel for platform {platform!r}: take `xla`, or `auto`, which does"
    )
