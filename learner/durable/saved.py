"""What became of a checkpoint: a plain record that travels to the driver."""

import dataclasses

CLOSE_S = 120.0
"""How long a learner that ends waits for the checkpoint that it writes in the background."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was written, or could not be."""

    step: int
    folder: str
    """Empty where it could not be written."""
    not_removed: list[str]
    """Older files that could not be removed, each with the reason; each is named once."""
    problem: str = ""
    """Why it could not be written in the background; the one before it is untouched."""
    earlier: list["Saved"] = dataclasses.field(default_factory=list)
    """Those of the background that ended before it and that no report has named."""
