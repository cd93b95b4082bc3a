"""The words of the step ledger: its phases, and the learner's name among the processes.

`phase_clock.py` measures the phases.
"""

LEARNER = "learner"
"""The learner's process; rollout workers have names of their own."""

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
    "environment",
)
"""Phases of the step ledger; `unexplained` is the rest and cannot be entered. timeline.jsonl has
their places in this list, so that a new one comes last."""

UNEXPLAINED = "unexplained"
WAITS = ("idle", "queue_wait", "weights_wait")
"""Phases in which a process waits for another one."""
UNCOUNTED = (*WAITS, "compile", "checkpoint")
"""Phases in which a process that is well may show no progress for long."""
