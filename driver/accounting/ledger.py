"""The seconds of a run: for each process the phases of a step add up to its wall time, and what no
phase claims is `unexplained`. A process that was not there all the time has no phase for the rest:
it was neither idle nor waiting, and that rest is recorded apart.

Each closed step is one line of ledger.jsonl, with the groups that ended in it (`leases.py`).
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from driver.accounting.jsonl import JsonlLog
from driver.accounting.leases import LeaseTable, LedgerError
from services.process.phases import PHASES, UNEXPLAINED

ROUNDING_S = 1e-6
"""Seconds that sums of floats may be off; no overlap."""
UNEXPLAINED_FLOOR_S = 0.25
"""No warning below this: a short step on a busy machine has as much jitter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One closed step, as ledger.jsonl has it."""

    step: int
    wall_s: float
    processes: dict[str, dict[str, float]]
    """Seconds by phase of each process; every phase of PHASES, `unexplained` included. They add up
    to wall_s, plus overlap_s and less absent_s of that process where it has one."""
    overlap_s: dict[str, float]
    """Processes whose phases add up to more than the step's wall time, and by how many seconds."""
    absent_s: dict[str, float]
    """Processes that were not there all the time, as they started, died or left in this step, or
    did not answer; and the seconds without information."""
    groups: dict[str, list[str]]
    """Group ids that ended since the last step was closed, by TrajectoryState value."""
    sources: dict[str, dict[str, int]]
    """Of several training sources, how many of these groups are of each, by state and name."""
    outstanding: int
    """Groups leased and not ended."""
    warnings: tuple[str, ...]
    spent: dict[str, float] = dataclasses.field(default_factory=dict)
    """By scorers at services that are paid for: requests, tokens, cost; empty without any."""


class StepLedger:
    """Closes steps: checks that seconds and groups add up, and writes ledger.jsonl.

    Args:
        folder: the run's output folder.
        unexplained_fraction: a process warns above this share of a step's wall time.
        warn: receives every warning; it must not raise.
    """

    def __init__(
        self, folder: pathlib.Path, *, unexplained_fraction: float, warn: Callable[[str], None]
    ):
        self._log = JsonlLog(folder / "ledger.jsonl")
        self._unexplained_fraction = unexplained_fraction
        self._warn = warn
        self._totals: dict[str, dict[str, float]] = {}

    def close_step(
        self,
        step: int,
        processes: Mapping[str, Mapping[str, float]],
        *,
        wall_s: float,
        leases: LeaseTable,
        gaps: Collection[str] = (),
        spent: Mapping[str, float] | None = None,
    ) -> StepRecord:
        """Closes one step.

        Args:
            step: its number.
            processes: seconds by phase of every process; phases that are absent count 0, and the
                process's own `unexplained` is computed anew from wall_s.
            wall_s: seconds that the step took on the driver's clock.
            leases: its groups are checked for conservation, and those that ended are listed.
            gaps: processes that did not report on the whole step; their seconds are kept.
            spent: what scorers have spent, by what.

        Raises:
            LedgerError: if a phase is unknown, a number of seconds is impossible, or groups were
                lost or counted twice.
        """
        leases.check_conservation()
        rows, overlap_s, absent_s, warnings = {}, {}, {}, []
        for process, phase_s in processes.items():
            row, over_s = _with_unexplained(step, process, phase_s, wall_s)
            if over_s > ROUNDING_S:
                overlap_s[process] = over_s
            reported_s = phase_s.get(UNEXPLAINED, 0.0)
            if process in gaps and row[UNEXPLAINED] > reported_s + ROUNDING_S:
                absent_s[process] = row[UNEXPLAINED] - reported_s
                row[UNEXPLAINED] = reported_s
            rows[process] = row
            warnings += self._warnings(f"step {step}:", process, row, over_s, wall_s)
        groups = leases.take_ended_groups()
        sources = {
            state: dict(collections.Counter(leases.names_of(ids).values()))
            for state, ids in groups.items()
        }
        record = StepRecord(
            step=step,
            wall_s=wall_s,
            processes=rows,
            overlap_s=overlap_s,
            absent_s=absent_s,
            groups=groups,
            sources={state: counts for state, counts in sources.items() if counts},
            outstanding=leases.outstanding,
            warnings=tuple(warnings),
            spent=dict(spent or {}),
        )
        self._log.append(dataclasses.asdict(record))
        self._add(rows)
        for warning in warnings:
            self._warn(warning)
        return record

    @property
    def totals(self) -> dict[str, dict[str, float]]:
        """Seconds by process and phase over all steps closed so far, resumed ones included."""
        return {process: dict(phases) for process, phases in self._totals.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values."""
        return {"totals": self.totals}

    def restore(self, state: Mapping[str, Any], *, step: int) -> int:
        """Goes on from a checkpoint at `step`; returns how many later lines moved aside."""
        self._totals = {process: dict(phases) for process, phases in state["totals"].items()}
        return self._log.rewind(step)

    def close_log(self) -> None:
        """Closes ledger.jsonl."""
        self._log.close()

    def _warnings(
        self, where: str, process: str, row: Mapping[str, float], over_s: float, wall_s: float
    ) -> list[str]:
        """Warnings about the seconds of one process."""
        slack_s = max(self._unexplained_fraction * wall_s, UNEXPLAINED_FLOOR_S)
        found = []
        if over_s > slack_s:
            found.append(
                f"{where} the phases of {process} add up to {wall_s + over_s:.2f} s of a "
                f"step that took {wall_s:.2f} s: some seconds are counted twice"
            )
        if row[UNEXPLAINED] > slack_s:
            found.append(
                f"{where} {row[UNEXPLAINED]:.2f} of {wall_s:.2f} s of {process} belong to "
                f"no phase; log.unexplained_fraction={self._unexplained_fraction:g} allows "
                f"{slack_s:.2f} s"
            )
        return found

    def _add(self, rows: Mapping[str, Mapping[str, float]]) -> None:
        for process, row in rows.items():
            total = self._totals.setdefault(process, dict.fromkeys(PHASES, 0.0))
            for phase, seconds in row.items():
                # A checkpoint may be older than a phase.
                total[phase] = total.get(phase, 0.0) + seconds


def _with_unexplained(
    step: int, process: str, phase_s: Mapping[str, float], wall_s: float
) -> tuple[dict[str, float], float]:
    """All phases of one process, `unexplained` being the rest; and the seconds claimed too many."""
    if not math.isfinite(wall_s) or wall_s <= 0:
        raise LedgerError(f"step {step}: {wall_s=} is no duration")
    for phase, seconds in phase_s.items():
        if phase not in PHASES:
            raise LedgerError(f"step {step}: {process} reports unknown phase {phase!r}")
        if not math.isfinite(seconds) or seconds < 0:
            raise LedgerError(f"step {step}: {process} reports {phase}={seconds} s")
    row = {phase: float(phase_s.get(phase, 0.0)) for phase in PHASES} | {UNEXPLAINED: 0.0}
    rest = wall_s - sum(row.values())
    row[UNEXPLAINED] = max(0.0, rest)
    return row, max(0.0, -rest)
