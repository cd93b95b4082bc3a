"""The section `placement`: where the processes run, and how long they are waited for."""

from typing import Literal

from pydantic import Field

from services.process.config_section import Section

WEEK_S = 604_800.0
"""Longest wait of a run: past it a deadline is as good as none."""


class Resources(Section):
    """What one actor asks of the Ray cluster."""

    cpus: float = Field(default=1.0, ge=0)
    """CPU cores that Ray reserves."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves."""
    tpus: float = Field(default=0.0, ge=0)
    """TPU chips that Ray reserves (its resource `TPU`)."""


class PlacementConfig(Section):
    """Where the processes run, and how long the driver waits for them."""

    mode: Literal["separate", "colocated"] = "separate"
    """`separate`: every role has processes of its own. `colocated`: the learner and one rollout
    worker share a process and all of its devices, which `learner` asks for; they take turns there,
    and a policy version stays on these devices."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """Accelerator that both roles need; no process ever falls back to another platform."""
    learner: Resources = Resources()
    """Resources of the learner's process."""
    rollout: Resources = Resources()
    """Resources of each rollout worker; not to be set where mode is colocated."""
    bind_host: str = "127.0.0.1"
    """Address the learner's gRPC server listens on: 0.0.0.0 on a cluster of several hosts, `::`
    where they have IPv6; without brackets."""
    private_network: bool = False
    """That only the cluster's hosts can listen on the network between them, such as a VPC or a VPN.
    A bind_host that other hosts reach needs this, or Ray with TLS (RAY_USE_TLS=1): Ray's token does
    not encrypt, and Ray carries the keys of the run's processes."""
    learner_port: int = Field(default=0, ge=0, le=65535)
    """Port of that server; 0 takes a free one."""
    startup_timeout_s: float = Field(default=300.0, ge=0.01, le=WEEK_S)
    """How long a process may take until it is ready."""
    resources_timeout_s: float = Field(default=60.0, ge=0.01, le=WEEK_S)
    """How long the cluster may take to provide the resources, at the start and to a run that has
    lost its learner or all of its workers."""
    step_timeout_s: float = Field(default=3600.0, ge=0.01, le=WEEK_S)
    """How long a call of a step, such as the update or an evaluation, may take. A process that
    makes no progress for a twelfth of this, and neither compiles nor writes a checkpoint, is
    replaced."""
    worker_restarts: int = Field(default=3, ge=0)
    """Restarts of rollout workers on one host within an hour; the pause before each restart of one
    worker grows. The loss of a host is one event, whatever ran there, and counts apart, up to the
    same number for each host."""
    learner_restarts: int = Field(default=3, ge=0)
    """Restarts of the learner on one host within an hour, each from the last checkpoint; losses of
    its host count apart, up to the same number for each host."""
