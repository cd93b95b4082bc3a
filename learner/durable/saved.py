"""What became of checkpoints: plain records that travel to the driver."""

import dataclasses
from collections.abc import Sequence

CLOSE_S = 120.0
"""How long a learner that ends waits for the checkpoint that it writes in the background."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was written, or could not be."""

    step: int
    problem: str = ""
    """Why it could not be written, such as a full disk; the one before it is untouched. Empty where
    it is complete."""
    not_removed: list[str] = dataclasses.field(default_factory=list)
    """Older files that could not be removed, each with the reason; each is named once."""
    blocked_s: float
    """Of the thread that trains: the wait for the checkpoint before, the copy to the host, and
    where it is not written in the background all of it."""
    write_s: float
    """From the first hash until the folder was complete and older ones were removed."""


def checkpoint_metrics(ended: Sequence[Saved]) -> dict[str, float]:
    """What checkpoints cost that ended since a step was closed; nothing where none did."""
    if not ended:
        return {}
    return {
        "checkpoint/blocked_s": sum(saved.blocked_s for saved in ended),
        "checkpoint/write_s": sum(saved.write_s for saved in ended),
    }
