"""How workers and learner are told to whoever asks for the fleet. Pure."""

from collections.abc import Mapping
from typing import Any

from driver.fleet.fleet_records import FleetState, Worker
from learner.learner_records import LearnerHealth
from services.control import messages as control
from services.process.process_memory import ProcessMemory

_STATES = {
    FleetState.STARTING: control.WorkerState.STARTING,
    FleetState.WAITING: control.WorkerState.STARTING,
    FleetState.READY: control.WorkerState.READY,
    FleetState.WORKING: control.WorkerState.WORKING,
    FleetState.DRAINING: control.WorkerState.DRAINING,
}
STARTING = "starting"
"""What a learner does that has not been heard of."""


def worker_status(worker: Worker, tokens_per_s: float) -> control.WorkerStatus:
    """One worker as it stands."""
    about = worker.about
    return control.WorkerStatus(
        name=worker.name,
        state=_STATES[worker.state],
        policy_version=worker.policy_version,
        host=about.get("host", ""),
        pid=about.get("pid", 0),
        restarts=worker.restarts,
        last_error=worker.last_error,
        groups_leased=len(worker.leases),
        groups_done=worker.done,
        tokens_per_s=tokens_per_s,
        slots=about.get("slots", 0),
        address=about.get("address", ""),
        devices=about.get("devices", ""),
        pull_gb_per_s=worker.pull_gb_per_s,
        **_memory(worker.memory),
    )


def learner_status(
    about: Mapping[str, Any], health: LearnerHealth | None, restarts: int
) -> control.LearnerStatus | None:
    """The learner as it was last heard.

    Args:
        about: what its process said of itself; empty before the first served.
        health: None where it was not asked yet.
        restarts: how often another one took its place.
    """
    if not about:
        return None
    return control.LearnerStatus(
        doing=STARTING if health is None else health.doing,
        policy_version=-1 if health is None else health.policy_version,
        issued_version=-1 if health is None else health.issued_version,
        host=about["host"],
        pid=about["pid"],
        devices=about["devices"],
        restarts=restarts,
        **_memory(None if health is None else health.memory),
    )


def _memory(held: ProcessMemory | None) -> dict[str, int]:
    """As in control.proto: what nobody told is 0 of the host and -1 of devices."""
    if held is None or held.device_bytes is None or held.device_peak_bytes is None:
        return {"host_bytes": held.host_bytes if held is not None else 0}
    return {
        "host_bytes": held.host_bytes,
        "device_bytes": held.device_bytes,
        "device_peak_bytes": held.device_peak_bytes,
    }
