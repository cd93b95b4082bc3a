"""The section `log`: what a run writes about itself, and where."""

from typing import Literal

from pydantic import Field

from services.process.config_section import Section


class WandbConfig(Section):
    """Weights & Biases as a second place for the metrics."""

    mode: Literal["online", "offline", "disabled"] = "disabled"
    """`offline` writes files for a later `wandb sync`; the API key is read from WANDB_API_KEY."""
    project: str = "tandem"
    """Project on W&B."""
    entity: str | None = None
    """User or team on W&B; null takes the default of the API key."""


class DashboardConfig(Section):
    """The web page that the run serves of itself (docs/dashboard.md)."""

    enabled: bool = True
    """Serve the page while the run goes on."""
    host: str = "127.0.0.1"
    """Address to listen on; its tokens cross the network unencrypted where it is not loopback."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """null takes 8470, or a free one where that is taken; 0 a free one."""


class TrackersConfig(Section):
    """Where the metrics of every step go beside metrics.jsonl."""

    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = False
    """Write the metrics of every step to event files in `tensorboard` of the run's folder."""


class LogConfig(TrackersConfig):
    """What the run writes about itself, and where."""

    samples_per_step: int = Field(default=4, ge=0, le=10_000)
    """Completions written to samples.jsonl at every step. At most two are of one group, its first
    and one chosen for a reason, so that a step of few groups writes fewer."""
    record_rollouts: bool = False
    """Append the groups of every update to rollouts.bin, to train on them again with
    `python -m learner.ab`. A step that cannot be written, as on a full disk, ends the run."""
    unexplained_fraction: float = Field(default=0.05, gt=0, le=1)
    """A step warns if a larger fraction of its seconds belongs to no phase."""
    dashboard: DashboardConfig = DashboardConfig()
    timeline: bool = True
    """Write the phases of each process with their times to timeline.jsonl: a few kB a step."""
