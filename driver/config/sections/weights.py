"""The section `weights`: how a policy version travels to the workers."""

from typing import Literal

from pydantic import Field

from driver.config.sections.placement import WEEK_S
from services.process.config_section import Section


class WeightsConfig(Section):
    """How a policy version travels to the workers."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights on the wire and in the workers."""
    chunk_bytes: int = Field(default=2**20, ge=1024, le=3 * 2**20)
    """Size of one message of a weight transfer."""
    streams: int = Field(default=2, ge=1, le=16)
    """Parallel gRPC streams of one transfer."""
    timeout_s: float = Field(default=600.0, ge=0.01, le=WEEK_S)
    """How long the transfer of one version may take."""
    keep_versions: int = Field(default=2, ge=1, le=64)
    """Published versions that the learner keeps in host memory."""
    relay_fanout: int = Field(default=2, ge=0, le=64)
    """Workers that fetch from the learner, and from each worker that has fetched; 0 has every
    worker fetch from the learner."""
    deltas: bool = True
    """Send only the elements that changed, to a worker that has the version before."""
    canary: bool = True
    """Have every worker score a fixed probe under each version, and compare its logprobs with the
    learner's."""
    canary_bound: float | None = Field(default=None, gt=0, le=100)
    """Largest gap of a logprob on the probe, in nats; null takes a bound for the dtypes."""
