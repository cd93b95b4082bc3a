"""The phases that the seconds of a step belong to; `phase_clock.py` measures them."""

PHASES: tuple[str, ...] = (
    "prefill",
    "decode",
    "reward",
    "serialise",
    "wire",
    "queue_wait",
    "weights_wait",
    "weights_swap",
    "forward_backward",
    "optimizer",
    "publish",
    "compile",
    "checkpoint",
    "eval",
    "idle",
    "unexplained",
)
"""Phases of the step ledger; `unexplained` is the rest and cannot be entered."""

UNEXPLAINED = "unexplained"
WAITS = ("idle", "queue_wait", "weights_wait")
"""Phases in which a process waits for another one."""
