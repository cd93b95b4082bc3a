"""The section `checkpoint`: when the state of a run is saved."""

from typing import Literal

from pydantic import Field

from services.process.config_section import Section


class CheckpointConfig(Section):
    """When the state of the run is saved, and how much of it stays."""

    every_steps: int = Field(default=10, ge=0)
    """0 writes one only at the end and on a signal."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints that remain; an older one goes after the newer one is verified."""
    asynchronous: bool = True
    """Write the checkpoints between the first step and the last beside the training, which waits
    only for a copy of the state in the memory of the host; false lets it wait until the checkpoint
    is on the disk and read back. One that a kill or an error interrupts counts as little as
    without."""
    keep_best: bool = True
    """Keep one more in checkpoints/best where an older one has a better evaluation: the accuracy of
    the first set of data.eval, or, in supervised training, the lowest held-out loss."""
    export_hf: bool = True
    """Write the final policy as an HF folder."""
    export_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the exported tensors; null gives each the type that it came in, and bfloat16 where
    the model was quantised."""
