"""The document of /api/run."""

import pathlib
from collections.abc import Mapping
from typing import Any

from dashboard.schemas import VERSION
from diagnosis.records.run_log import RunLog
from services.process.phases import LEARNER, PHASES

_STATUS = (
    *("run", "run_id", "exit_code", "reason", "step", "started", "ended"),
    *("last_checkpoint", "pid", "host"),
)
"""Keys that are the same in status.json."""


def run_json(
    log: RunLog,
    folder: pathlib.Path,
    *,
    state: str,
    can_control: bool,
    environment: Mapping[str, Any] | None,
    compare: bool,
    now: float,
) -> dict[str, Any]:
    """The document of /api/run.

    Args:
        folder: of the run.
        state: as `state_of_run` says.
        can_control: whether this process can reach the driver's control service.
        environment: of environment.json, if the run has one.
        compare: whether the run is compared with another one.
        now: Unix seconds.
    """
    status = {key: log.status.get(key) for key in _STATUS}
    return {
        **status,
        "run": status["run"] or folder.name,
        "step": log.last_step,
        "state": state,
        "folder": str(folder),
        "steps_total": log.settings.steps,
        "live": state == "running",
        "can_control": can_control and state == "running",
        "now": now,
        "processes": list(log.processes),
        "phases": list(PHASES),
        "scorers": scorers(log),
        "settings": vars(log.settings),
        "config": log.config,
        "environment": environment,
        "compare": compare,
        "version": VERSION,
    }


def scorers(log: RunLog) -> list[str]:
    """Names of the reward functions, those of the configuration first."""
    section = log.config.get("reward")
    functions = section.get("functions") if isinstance(section, Mapping) else None
    functions = functions if isinstance(functions, list) else []
    named = [one["name"] for one in functions if isinstance(one, Mapping) and "name" in one]
    measured = [
        name.removeprefix("reward/").removesuffix("/mean")
        for name in log.metric_names
        if name.startswith("reward/") and name.endswith("/mean") and name != "reward/total/mean"
    ]
    return list(dict.fromkeys([*named, *measured]))


def workers(log: RunLog) -> list[str]:
    """The rollout workers that the ledger knows."""
    return [name for name in log.processes if name != LEARNER]
