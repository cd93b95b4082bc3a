"""A user's scorer by import path: takes its time, pays for spread among byte values, and can hold a
run."""

import pathlib
import time

POLL_S = 0.05


def score(
    completion: str,
    *,
    answer: str,
    prompt: str,
    item: dict,
    seconds: float,
    gate: str | None = None,
) -> float:
    """Args:
    gate: a file beside the run's folder `out`. While it is there, no completion is scored once the
        run has taken as many steps as it says: a test does to a held run what it wants to.
    """
    time.sleep(seconds)
    while gate is not None and is_held(pathlib.Path(gate)):
        time.sleep(POLL_S)
    return len(set(completion)) / 16.0


def is_held(gate: pathlib.Path) -> bool:
    """Whether the run has taken the steps that its gate lets pass."""
    try:
        allowed = int(gate.read_text())
        taken = (gate.parent / "out" / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return False
    return taken >= allowed
