"""Prompts whose completion or scoring ends the worker that is at it, and those set aside for that.

A worker that dies may have begun several groups, and its death does not say which of them was the
cause. So each of them is a suspect from then on, and a suspect is leased alone: its worker holds no
other lease until it ends (`driver/fleet/dispatch.py`). One that ends well is cleared. When its
worker dies again, nothing else can have been the cause, and the prompt is set aside: no group of it
is leased any more, in this epoch or a later one, and the next prompt of the data order takes its
place. Groups that were merely beside it cost a few slower leases and are never set aside.

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
"""Of workers, the last one while it held this prompt alone, after which it is set aside."""


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
        return lease.position in self._suspects

    def record_death(self, begun: Sequence[Lease], cause: str) -> Suspect | None:
        """Counts the death of a worker against the groups that it may have begun.

        Returns:
            the prompt that is set aside from now on, if one is.
        """
        alone = len(begun) == 1
        for lease in begun:
            before = self._suspects.get(lease.position)
            # Beside others a further death proves no more than the first.
            deaths = 1 if before is None else before.deaths + alone
            self._suspects[lease.position] = Suspect(
                position=lease.position, group_id=lease.group_id, deaths=deaths, cause=cause
            )
        guilty = [one for one in self._suspects.values() if one.deaths >= DEATHS]
        for one in guilty:
            self._aside[one.position] = self._suspects.pop(one.position)
        if begun:
            self._write()
        return guilty[0] if guilty else None

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
