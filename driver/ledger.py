"""The books of a run: where every second went, and what became of every group.

`StepLedger` holds the seconds: for each process the phases of a step add up to its wall time, and
what no phase claims is `unexplained`. `LeaseBook` holds the prompts: which come next, which are out
with workers, and in which single state each group ended. Both go into every checkpoint; what they
note at the end of a step goes into ledger.jsonl.
"""

import dataclasses
import enum
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from driver.jsonl import JsonlLog
from rollout_worker.order import prompt_at
from services.messages import Lease
from services.phase_clock import PHASES, UNEXPLAINED

UNEXPLAINED_FLOOR_S = 0.25
"""Below this nobody is warned: a short step on a busy machine has so much jitter."""


class LedgerError(RuntimeError):
    """The books do not balance: a fault in this program, not in the user's input."""


class TrajectoryState(enum.Enum):
    """The one state in which a delivered group ends."""

    TRAINED = "trained"
    DROPPED_STALE = "dropped_stale"
    DROPPED_ZERO_VARIANCE = "dropped_zero_variance"
    DROPPED_ERROR = "dropped_error"
    DUPLICATE = "duplicate"
    """A further delivery of a group that had one already."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One closed step, as it stands in ledger.jsonl."""

    step: int
    wall_s: float
    processes: dict[str, dict[str, float]]
    """Seconds by phase of each process; every phase of PHASES, `unexplained` included. They add up
    to wall_s, plus overlap_s of that process where it has one."""
    overlap_s: dict[str, float]
    """Processes whose phases claim more seconds than the step had, and how many more."""
    groups: dict[str, list[str]]
    """Group ids that ended since the last step was closed, by TrajectoryState value."""
    outstanding: int
    """Groups leased and not ended."""
    warnings: tuple[str, ...]

    def busy_s(self, process: str) -> float:
        """Seconds in which the process did something else than wait."""
        waits = ("idle", "queue_wait", "weights_wait", UNEXPLAINED)
        return sum(s for phase, s in self.processes[process].items() if phase not in waits)


class LeaseBook:
    """The data cursor, the leases that are out, and how every group ended.

    A group is one index of the endless data order `prompt_at(seed, count, index)`; its id is made
    from that index, so that a resumed run leases the same groups under the same ids. State lives
    only for leases that are out: all indices below the cursor that are neither out nor waiting to
    be leased again have ended.
    """

    def __init__(self, *, seed: int, prompt_count: int):
        if prompt_count < 1:
            raise ValueError(f"a run needs at least one prompt, got {prompt_count=}")
        self._seed = seed
        self._prompt_count = prompt_count
        self._cursor = 0
        self._outstanding: dict[int, int] = {}
        self._returned: dict[int, int] = {}
        self._totals = dict.fromkeys(TrajectoryState, 0)
        self._recent: dict[TrajectoryState, list[str]] = {state: [] for state in TrajectoryState}

    @property
    def cursor(self) -> int:
        """The first index that was never leased."""
        return self._cursor

    @property
    def outstanding(self) -> int:
        """Groups that are leased and have not ended."""
        return len(self._outstanding)

    @property
    def totals(self) -> dict[str, int]:
        """Deliveries of the whole run by state."""
        return {state.value: count for state, count in self._totals.items()}

    def lease(self, count: int) -> list[Lease]:
        """Leases the next groups: first what came back unfinished, then new prompts, in order."""
        again = sorted(self._returned)[:count]
        attempts = {index: self._returned.pop(index) for index in again}
        while len(attempts) < count:
            attempts[self._cursor] = 0
            self._cursor += 1
        self._outstanding.update(attempts)
        return [self._lease(index, attempt) for index, attempt in attempts.items()]

    def give_back(self) -> int:
        """Takes back every lease that is out, to be leased again first; returns how many."""
        count = len(self._outstanding)
        self._returned.update({index: a + 1 for index, a in self._outstanding.items()})
        self._outstanding.clear()
        return count

    def end(self, group_id: str, state: TrajectoryState) -> TrajectoryState:
        """Notes what became of one delivery of a group.

        Returns:
            The state noted: DUPLICATE for every delivery after the one that ended the group.

        Raises:
            LedgerError: if this group was never leased.
        """
        index = _index_of(group_id)
        if index is None or index >= self._cursor:
            raise LedgerError(
                f"group {group_id} ended as {state.value} but was never leased: the next new "
                f"group is {_group_id(self._cursor)}"
            )
        if state is not TrajectoryState.DUPLICATE:
            if index in self._outstanding:
                del self._outstanding[index]
            elif index in self._returned:
                del self._returned[index]
            else:
                state = TrajectoryState.DUPLICATE
        self._totals[state] += 1
        self._recent[state].append(group_id)
        return state

    def check(self) -> None:
        """Holds the law of conservation: leased = ended + out + waiting to be leased again.

        Raises:
            LedgerError: with all the numbers.
        """
        ended = sum(self._totals.values()) - self._totals[TrajectoryState.DUPLICATE]
        accounted = ended + len(self._outstanding) + len(self._returned)
        if accounted != self._cursor:
            raise LedgerError(
                f"{self._cursor} groups were leased, but {ended} ended, {len(self._outstanding)} "
                f"are out and {len(self._returned)} wait to be leased again: {accounted} in all"
            )

    def take_recent(self) -> dict[str, list[str]]:
        """Group ids by state since the last call; empty states are left out."""
        recent = {state.value: ids for state, ids in self._recent.items() if ids}
        self._recent = {state: [] for state in TrajectoryState}
        return recent

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values."""
        unfinished = {**self._returned, **{i: a + 1 for i, a in self._outstanding.items()}}
        return {
            "seed": self._seed,
            "prompt_count": self._prompt_count,
            "cursor": self._cursor,
            "unfinished": sorted(unfinished.items()),
            "totals": self.totals,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], *, seed: int, prompt_count: int) -> "LeaseBook":
        """The book of a checkpoint; what was out when it was written is leased again first.

        Raises:
            ValueError: if seed or data are not those of the checkpoint, since the order of the
                prompts would be another one.
        """
        wanted = {"seed": seed, "prompt_count": prompt_count}
        for name, value in wanted.items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint was made with {name}={state[name]}, this run has "
                    f"{name}={value}: resume with the same data and seed, or start a new run"
                )
        book = cls(seed=seed, prompt_count=prompt_count)
        book._cursor = state["cursor"]
        book._returned = {index: attempt for index, attempt in state["unfinished"]}
        book._totals = {s: state["totals"][s.value] for s in TrajectoryState}
        book.check()
        return book

    def _lease(self, index: int, attempt: int) -> Lease:
        epoch, position = prompt_at(self._seed, self._prompt_count, index)
        return Lease(group_id=_group_id(index), attempt=attempt, epoch=epoch, position=position)


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

    def close(
        self,
        step: int,
        processes: Mapping[str, Mapping[str, float]],
        *,
        wall_s: float,
        book: LeaseBook,
    ) -> StepRecord:
        """Books one step.

        Args:
            step: its number.
            processes: seconds by phase of every process; phases that are absent count 0, and the
                process's own `unexplained` is computed anew from wall_s.
            wall_s: seconds that the step took on the driver's clock.
            book: its groups are checked for conservation, and those that ended are listed.

        Raises:
            LedgerError: if a phase is unknown, a number of seconds is impossible, or groups got
                lost or counted twice.
        """
        book.check()
        rows, overlap_s, warnings = {}, {}, []
        for process, phase_s in processes.items():
            row, over = _balance(step, process, phase_s, wall_s)
            rows[process] = row
            slack_s = max(self._unexplained_fraction * wall_s, UNEXPLAINED_FLOOR_S)
            if over > 0:
                overlap_s[process] = over
            if over > slack_s:
                warnings.append(
                    f"step {step}: the phases of {process} add up to {wall_s + over:.2f} s of a "
                    f"step that took {wall_s:.2f} s: some seconds are counted twice"
                )
            if row[UNEXPLAINED] > slack_s:
                warnings.append(
                    f"step {step}: {row[UNEXPLAINED]:.2f} of {wall_s:.2f} s of {process} belong to "
                    f"no phase; log.unexplained_fraction={self._unexplained_fraction:g} allows "
                    f"{slack_s:.2f} s"
                )
        record = StepRecord(
            step=step,
            wall_s=wall_s,
            processes=rows,
            overlap_s=overlap_s,
            groups=book.take_recent(),
            outstanding=book.outstanding,
            warnings=tuple(warnings),
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
        self._log.close()

    def _add(self, rows: Mapping[str, Mapping[str, float]]) -> None:
        for process, row in rows.items():
            total = self._totals.setdefault(process, dict.fromkeys(PHASES, 0.0))
            for phase, seconds in row.items():
                total[phase] += seconds


def _balance(
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
    row = {phase: float(phase_s.get(phase, 0.0)) for phase in PHASES if phase != UNEXPLAINED}
    rest = wall_s - sum(row.values())
    row[UNEXPLAINED] = max(0.0, rest)
    return row, max(0.0, -rest)


def _group_id(index: int) -> str:
    return f"g{index:08d}"


def _index_of(group_id: str) -> int | None:
    digits = group_id.removeprefix("g")
    return int(digits) if digits.isdecimal() and group_id == _group_id(int(digits)) else None
