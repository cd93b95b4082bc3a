"""Prompts whose completion or scoring ends the worker that is at it, and those set aside for that.

A worker that dies may have begun several groups, and its death does not say which of them was the
cause, if any. They are leased again as ever, and those that end well are cleared. A prompt that was
there again when a second worker died is leased alone from then on: its worker holds no other lease
until it ends (`driver/fleet/dispatch.py`). Once a worker has died over it alone, and at least one
before, nothing else can have been the cause, and the prompt is set aside: no group of it is leased
any more, in this epoch or a later one, and the next prompt of the data order takes its place. So a
single crash slows nothing down, and groups that were merely beside are never set aside.

Both lists are in `quarantine.json` of the run's folder, which no rollback to a checkpoint touches,
so that a resumed run neither begins with the prompt that ended it nor composes its steps anew.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from driver.errors import RunError
from services.process.whole_file import write_whole
from services.wire.messages import Lease

FILE = "quarantine.json"
DEATHS = 2
"""Of workers over groups that have one prompt in common: from then on it is leased alone, and it is
set aside if the last worker held nothing else."""


class DamagedQuarantine(RunError):
    """The record of the prompts that are set aside cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suspect:
    """A prompt whose worker has died."""

    position: int
    """In the training set."""
    group_id: str
    """Its group that was under way when that happened last."""
    deaths: int
    cause: str
    """What the last worker died of."""


class Quarantine:
    """Owns `quarantine.json` of one run."""

    def __init__(self, folder: pathlib.Path):
        """Reads what an earlier start of the run has left.

        Raises:
            DamagedQuarantine: if the file is not as this class writes it.
        """
        self._path = folder / FILE
        self._suspects: dict[int, Suspect] = {}
        self._aside: dict[int, Suspect] = {}
        if self._path.is_file():
            self._read()

    @property
    def set_aside(self) -> dict[int, Suspect]:
        """Prompts that are not leased any more, by position."""
        return self._aside

    def is_suspect(self, lease: Lease) -> bool:
        """Whether a lease must be the only one of its worker."""
        suspect = self._suspects.get(lease.position)
        return suspect is not None and suspect.deaths >= DEATHS

    def record_death(self, begun: Sequence[Lease], cause: str) -> Suspect | None:
        """Counts the death of a worker against the groups that it may have begun.

        Returns:
            the prompt that is set aside from now on, if one is.
        """
        suspect = None
        for lease in begun:
            before = self._suspects.get(lease.position)
            suspect = self._suspects[lease.position] = Suspect(
                position=lease.position,
                group_id=lease.group_id,
                deaths=1 + (before.deaths if before else 0),
                cause=cause,
            )
        guilty = suspect if suspect and len(begun) == 1 and suspect.deaths >= DEATHS else None
        if guilty is not None:
            self._aside[guilty.position] = self._suspects.pop(guilty.position)
        if begun:
            self._write()
        return guilty

    def clear_group(self, group_id: str) -> None:
        """Clears the prompt of a group that has ended well."""
        for one in [*self._suspects.values()]:
            if one.group_id == group_id:
                del self._suspects[one.position]
                self._write()

    def _write(self) -> None:
        record = {
            "suspects": [dataclasses.asdict(one) for one in self._suspects.values()],
            "set_aside": [dataclasses.asdict(one) for one in self._aside.values()],
        }
        write_whole(self._path, json.dumps(record, indent=1), sync=True)

    def _read(self) -> None:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            self._suspects = _by_position(record["suspects"])
            self._aside = _by_position(record["set_aside"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedQuarantine(
                f"{self._path} is not as this program writes it "
                f"({type(error).__name__}: {error}): correct it, or remove it to lease again the "
                "prompts that it sets aside"
            ) from error


def _by_position(records: Sequence[dict[str, Any]]) -> dict[int, Suspect]:
    found = [Suspect(**record) for record in records]
    for one in found:
        if not isinstance(one.position, int) or not isinstance(one.deaths, int):
            raise TypeError(f"position and deaths must be whole numbers, got {one}")
    return {one.position: one for one in found}
